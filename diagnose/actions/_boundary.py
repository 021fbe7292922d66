"""Puts a whole model call behind one node of autograd, so that it can be computed in another way.

The loop sees one output for the full batch, and its loss sends one gradient back, as ever. Between the two
the call may be made in pieces, or again. Gradients leave the node as its own results: what hangs on the
parameters, accumulation, DDP's reducer, the script's hooks, meets each of them once, in the script's own
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from diagnose.actions._blame import raised_by_us
from diagnose.actions._careful import Failure, in_short
from diagnose.actions._module_hooks import FORWARD, hooks_of
from diagnose.actions._nested import differentiable, mapped, mapped_once, tensors
from diagnose.actions._shadow_step import Inputs
from diagnose.actions._untouched import RandomState, devices_of, random_numbers_again, untouched
from diagnose.actions._watch import autocast_now, in_autocast, unwrapped
from diagnose.actions.base import CannotApply

Gradients = Sequence["torch.Tensor | None"]


class Segment:
    """One outermost call of a model in training.

    Args:
        call: Calls what it is given first with what follows.
        args: The model and its positional arguments.
        kwargs: Its other arguments.
        failure: Gets the reason where something of ours fails on the way back; the model is then called
            once more, whole, and gone back through.

    Attributes:
        inner: The model itself, without DDP around it.
        starts: Parameters and inputs that take a gradient.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        failure: Failure | None = None,
    ) -> None:
        self._call = call
        self._failure = failure or Failure()
        self.model: nn.Module = args[0]
        self.inner = unwrapped(self.model)
        self.inputs: Inputs = (args[1:], kwargs)
        self.parameters = [p for p in self.inner.parameters() if p.requires_grad]
        self.starts: list[torch.Tensor] = [*self.parameters, *differentiable(self.inputs)]
        self.devices = devices_of([*tensors(self.inputs), *self.parameters])
        self.random = RandomState(self.devices)
        self._autocast = autocast_now({"cpu", *(device.type for device in self.devices)})
        self._versions = [p._version for p in self.parameters]
        self._ends: list[torch.Tensor] = []
        self._inner_starts: list[torch.Tensor] = []

    def run(self) -> Any:
        """Makes the call; returns what the script gets.

        With forward hooks it is made as ever: they may keep what is freed behind the node.
        """
        hooked = any(hooks_of(self.model, FORWARD))
        if hooked or not self.starts or not torch.is_grad_enabled():
            return self._call(self.model, *self.inputs[0], **self.inputs[1])
        output: list[Any] = []
        ends = _Boundary.apply(self, output, *self.starts)  # type: ignore[no-untyped-call]
        (inner,) = output
        outer = {id(mine): end for mine, end in zip(differentiable(inner), ends, strict=True)}
        return mapped(lambda tensor: outer.get(id(tensor), tensor), inner)

    def forward(self) -> Any:
        """Makes the call; the tensors in the output that carry a gradient are told by `requires_grad`."""
        return self.whole(self.model)

    def backward(self, gradients: Gradients, keep: bool) -> Gradients:
        """Returns the gradients of `starts`.

        Args:
            gradients: Of the outputs that carry one.
            keep: Whether the script wants to go back once more.
        """
        return self.pull(self._ends, self._inner_starts, gradients, keep)

    def backward_in_any_case(self, gradients: Gradients, keep: bool) -> Gradients:
        """See `backward`; where that fails by a fault of ours, the call is made again as it was written."""
        try:
            return self.backward(gradients, keep)
        except Exception as error:
            if not raised_by_us(error):
                raise
            self._failure.reason = f"it failed in use: {in_short(error)}"
        self.free()
        with self.again():
            self.whole(self.inner)
            return self.pull(self._ends, self._inner_starts, gradients, keep)

    def whole(self, model: nn.Module) -> Any:
        """Calls the model with the full batch, and keeps the graph."""
        output, self._inner_starts = self.called(model, self.inputs)
        self._ends = differentiable(output)
        return output

    def called(self, model: nn.Module, inputs: Inputs) -> tuple[Any, list[torch.Tensor]]:
        """Calls the model on inputs cut from their graph.

        Returns:
            The output, and what stands for `starts` in its graph.
        """

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().requires_grad_() if tensor.requires_grad else tensor

        args, kwargs = mapped_once(cut, inputs)
        starts = [*self.parameters, *differentiable((args, kwargs))]
        with torch.enable_grad(), in_autocast(self._autocast):
            output = self._call(model, *args, **kwargs)
        return output, starts

    def free(self) -> None:
        """Lets go of the graph."""
        self._ends, self._inner_starts = [], []

    @contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the model is as in the script's call; that leaves no trace in generators and buffers.

        Raises:
            RuntimeError: If the script has changed the parameters since; autograd says the same.
        """
        if [p._version for p in self.parameters] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                "operation: a parameter, between the model's call and the backward pass"
            )
        with random_numbers_again(self.devices), untouched(self.inner):
            self.random.restore()
            yield

    def pull(
        self, ends: Sequence[torch.Tensor], starts: Sequence[torch.Tensor], given: Gradients, keep: bool
    ) -> Gradients:
        """Returns the gradients of some starts; the script's hooks on parameters run later, outside."""
        used = [(end, gradient) for end, gradient in zip(ends, given, strict=True) if gradient is not None]
        if not used:
            return [None] * len(starts)
        with hooks_asleep(self.parameters):
            return torch.autograd.grad(
                [end for end, _ in used],
                starts,
                [gradient for _, gradient in used],
                retain_graph=keep,
                allow_unused=True,
            )

    def backward_again(self, gradients: Gradients) -> Gradients:
        """Returns gradients that can themselves be differentiated, as a gradient penalty asks."""
        with self.again(), torch.enable_grad(), hooks_asleep(self.parameters):
            with in_autocast(self._autocast):
                ends = differentiable(self._call(self.inner, *self.inputs[0], **self.inputs[1]))
            used = [(e, g) for e, g in zip(ends, gradients, strict=True) if g is not None]
            return torch.autograd.grad(
                [end for end, _ in used],
                self.starts,
                [gradient for _, gradient in used],
                create_graph=True,
                allow_unused=True,
            )


class _Boundary(torch.autograd.Function):
    """The node."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, output: list[Any], *starts: torch.Tensor) -> Any:
        ctx.segment = segment
        ctx.set_materialize_grads(False)
        output.append(segment.forward())
        return tuple(end.detach() for end in differentiable(output[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if torch.is_grad_enabled():
            return None, None, *ctx.segment.backward_again(gradients)
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        return None, None, *ctx.segment.backward_in_any_case(gradients, keep)


def check_torch() -> None:
    """Raises `CannotApply` if this torch lacks a private name used here."""
    if not hasattr(torch._C._autograd, "_get_current_graph_task_keep_graph"):
        raise CannotApply("this torch has no torch._C._autograd._get_current_graph_task_keep_graph")


@contextmanager
def hooks_asleep(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, hooks on some tensors do not run."""
    held = [(p._backward_hooks, dict(p._backward_hooks)) for p in parameters if p._backward_hooks]
    for hooks, _ in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in held:
            hooks.update(before)
