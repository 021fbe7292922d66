"""Makes a model call with a part of the batch at a time, behind one node of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from diagnose.actions._boundary import Gradients, Segment
from diagnose.actions._careful import Failure
from diagnose.actions._nested import differentiable, mapped, mapped_once, tensors
from diagnose.actions._shadow_step import Inputs, batch_size


class CannotSplit(Exception):
    """The output is not made of one part per sample; the message says what it is."""


class Pieces(Segment):
    """A call that is made with a part of the batch at a time.

    Forward keeps the graph of the last piece only; backward computes the others once more, one by one.

    Args:
        num_pieces: How many.
        failure: See `Segment`.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_pieces: int,
        failure: Failure | None = None,
    ) -> None:
        super().__init__(call, args, kwargs, failure)
        self.num_pieces = num_pieces
        self._bounds: list[tuple[int, int]] = []
        self._kept: Inputs = self.inputs

    def forward(self) -> Any:
        self._kept = copied(self.inputs)  # the script may write to them before its backward pass
        try:
            return self.in_pieces(self.model)
        except CannotSplit:
            self._bounds = []
            return super().forward()

    def backward(self, gradients: Gradients, keep: bool) -> Gradients:
        if not self._bounds:
            return super().backward(gradients, keep)
        return self.sum_of_pieces(gradients)

    def in_pieces(self, model: nn.Module) -> Any:
        """Makes the call in pieces, the last through `model`, whose wrapper then knows of the pass.

        Raises:
            CannotSplit: If the output is not one part per sample.
        """
        size = self.cut(self.num_pieces)
        outputs = []
        for bounds in self._bounds[:-1]:
            args, kwargs = part_of(self._kept, bounds, size)
            with torch.no_grad():
                outputs.append(self._call(self.inner, *args, **kwargs))
        torch.clear_autocast_cache()  # of weights cast where nothing takes a gradient
        last, self._inner_starts = self.called(model, part_of(self._kept, self._bounds[-1], size))
        self._ends = differentiable(last)
        return joined([*outputs, last], [high - low for low, high in self._bounds])

    def cut(self, num_pieces: int) -> int:
        """Cuts the batch into pieces; returns its samples.

        Raises:
            CannotSplit: If there is one sample only.
        """
        size = batch_size(self._kept)
        self._bounds = _bounds(size, num_pieces)
        if len(self._bounds) < 2:
            raise CannotSplit("there is one sample only")
        return size

    def sum_of_pieces(self, gradients: Gradients) -> Gradients:
        """Goes back through each piece; the last is still there, the others are computed again."""
        size = self._bounds[-1][1]
        totals: list[torch.Tensor | None] = [None] * len(self.starts)
        with self.again():
            for bounds in reversed(self._bounds):
                given = [_rows(gradient, bounds, size) for gradient in gradients]
                if self._ends:
                    found = self.pull(self._ends, self._inner_starts, given, False)
                    self.free()
                else:
                    output, starts = self.called(self.inner, part_of(self._kept, bounds, size))
                    found = self.pull(differentiable(output), starts, given, False)
                for index, gradient in enumerate(found):
                    if gradient is not None:
                        is_part = index >= len(self.parameters) and _has_rows(self.starts[index], size)
                        totals[index] = _added(totals[index], gradient, self.starts[index], is_part, bounds)
        return totals


def part_of(inputs: Inputs, bounds: tuple[int, int], size: int) -> Inputs:
    """Returns the inputs with some of the samples."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if not _has_rows(tensor, size):
            return tensor
        return tensor.detach()[bounds[0] : bounds[1]].requires_grad_(tensor.requires_grad)

    args, kwargs = mapped_once(part, inputs)
    return args, kwargs


def joined(outputs: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Puts the outputs of pieces together; what carried a gradient in the last one is told so.

    Raises:
        CannotSplit: If a tensor in them has no rows for each sample.
    """
    leaves = [tensors(output) for output in outputs]
    if len({len(each) for each in leaves}) > 1:
        raise CannotSplit("the number of tensors in the output changes with the samples")
    made: dict[int, torch.Tensor] = {}
    for parts in zip(*leaves, strict=True):
        rows = [part.shape[0] if part.dim() else 0 for part in parts]
        per_sample = rows[0] // sizes[0]
        if not per_sample or rows != [per_sample * size for size in sizes]:
            raise CannotSplit("the model returns a value for the batch as a whole, such as a loss")
        if id(parts[-1]) not in made:
            whole = torch.cat([part.detach() for part in parts])
            made[id(parts[-1])] = whole.requires_grad_(parts[-1].requires_grad)
    return mapped(lambda tensor: made[id(tensor)], outputs[-1])


def copied(inputs: Inputs) -> Inputs:
    """Copies the inputs, and keeps which of them are one tensor."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    args, kwargs = mapped_once(copy, inputs)
    return args, kwargs


def _bounds(size: int, num_pieces: int) -> list[tuple[int, int]]:
    """Cuts a batch into pieces that differ by one sample at most."""
    pieces = min(size, num_pieces)
    return [(index * size // pieces, (index + 1) * size // pieces) for index in range(pieces)]


def _has_rows(tensor: torch.Tensor, size: int) -> bool:
    return bool(tensor.dim()) and tensor.shape[0] == size


def _rows(gradient: torch.Tensor | None, bounds: tuple[int, int], size: int) -> torch.Tensor | None:
    if gradient is None:
        return None
    per_sample = gradient.shape[0] // size
    return gradient[bounds[0] * per_sample : bounds[1] * per_sample]


def _added(
    total: torch.Tensor | None,
    gradient: torch.Tensor,
    start: torch.Tensor,
    is_part: bool,
    bounds: tuple[int, int],
) -> torch.Tensor:
    """Adds one piece's gradient: to a parameter's sum, or in its place among the samples."""
    if not is_part:
        return gradient if total is None else total + gradient  # not in place: two may be one tensor
    whole = torch.zeros_like(start) if total is None else total
    whole[bounds[0] : bounds[1]] = gradient
    return whole
