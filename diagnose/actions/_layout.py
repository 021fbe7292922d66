"""Weights of convolutions, and what optimizers keep for them, in another order in memory, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job

ALONE = 2
"""References to the storage of a tensor that has it to itself: the tensor's, and the one that asks."""

CODES = torch.uint8
"""The type of moments in one byte each. A scale is of what lies together in memory, so they stay where they
are: who reads them goes by their strides, and the next step codes them as the weight lies then."""


def weights_to_convert(job: Job) -> list[torch.nn.Parameter]:
    """Returns the weights of the convolutions that lie channel by channel.

    Raises:
        CannotApply: If there are none.
    """
    layers = (
        module
        for model in job.models
        for module in model.modules()
        if isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d)
    )
    weights = {id(w): w for layer in layers if (w := layer._parameters.get("weight")) is not None}
    if not weights:
        raise CannotApply("no model has a two-dimensional convolution with a weight of its own")
    found = [w for w in weights.values() if w.is_contiguous() and not _is_channels_last(w)]
    if not found:
        raise CannotApply("the convolutions' weights lie in the layout channels_last already")
    return found


def refuse_shared(weights: list[torch.nn.Parameter]) -> None:
    """Raises `CannotApply` if anything else sees the memory of a weight: it would see no more updates."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    if count is None:
        raise CannotApply("this torch has no torch._C._storage_Use_Count")
    for weight in weights:
        storage = weight.untyped_storage()
        if storage.nbytes() != weight.numel() * weight.element_size():
            raise CannotApply("the weights are parts of one large buffer")
        if weight.device.type == "cpu" and weight.is_shared():
            raise CannotApply("other processes share the weights")
        if count(storage._cdata) > ALONE:
            raise CannotApply("something else holds the memory of the weights, such as an alias of them")


class Conversion:
    """The conversion of some weights.

    The parameters remain the objects that they are. Their memory is kept, and written back and put back on
    leaving; what optimizers keep for them, and gradients, are converted there and back. `CODES` are left
    alone.
    """

    def __init__(self, weights: Iterable[torch.nn.Parameter], job: Job) -> None:
        self._before = WeakTensorKeyDictionary({weight: weight.data for weight in weights})
        self._job = job
        self._optimizers: WeakSet[Any] = WeakSet()

    @torch.no_grad()
    def convert(self) -> None:
        """Converts everything."""
        for weight in self._before:
            weight.data = _converted(weight)
        self.convert_beside()

    def convert_beside(self) -> None:
        """Converts gradients and the optimizers' tensors as the weights are."""
        self._optimizers.update(self._job.optimizers)  # the script may have made others since
        for weight in self._before:
            for tensor in self._beside(weight):
                tensor.data = _like(tensor.data, weight)

    @torch.no_grad()
    def revert(self) -> None:
        """Puts everything back, as often as it is called: a numerics check may have put the memory that a
        weight had during its check back after a revert."""
        for weight, memory in self._before.items():
            if weight.data_ptr() != memory.data_ptr():
                memory.copy_(weight)
                weight.data = memory
        self.convert_beside()

    def _beside(self, weight: torch.nn.Parameter) -> Iterator[torch.Tensor]:
        if weight.grad is not None:
            yield weight.grad
        for optimizer in self._optimizers:
            for value in optimizer.state.get(weight, {}).values():
                if lies_as(weight, value):
                    yield value

    def _loaded(self, optimizer: Any) -> None:
        self.convert_beside()

    @contextmanager
    def checkpoints_as_before(self, optimizer: Any) -> Iterator[None]:
        """What the optimizer saves has the weights' usual layout, and what it loads gets the present one.

        Torch's fused steps on a CPU compute garbage where a weight and its state lie differently, so a
        checkpoint with our layout must not meet a script with another.
        """

        def show(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
            return {**state_dict, "state": {k: _contiguous(v) for k, v in state_dict["state"].items()}}

        with ExitStack() as stack:
            stack.callback(optimizer.register_state_dict_post_hook(show).remove)
            stack.callback(optimizer.register_load_state_dict_post_hook(self._loaded).remove)
            del optimizer
            yield


def lies_as(weight: torch.Tensor, kept: Any) -> bool:
    """Whether what an optimizer keeps for a weight has to lie in memory as the weight does."""
    return isinstance(kept, torch.Tensor) and kept.shape == weight.shape and kept.dtype is not CODES


def image_to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Converts what a convolution may read, and leaves other tensors alone."""
    if tensor.dim() == 4 and tensor.is_floating_point():
        return tensor.contiguous(memory_format=torch.channels_last)
    return tensor


def image_to_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """Converts an output back: the script may call `view` on it."""
    return tensor.contiguous() if tensor.dim() == 4 and _is_channels_last(tensor) else tensor


def _converted(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().clone(memory_format=torch.channels_last)


def _like(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The values of one tensor in the layout of another."""
    if tensor.stride() == weight.stride():
        return tensor
    result = torch.empty_like(weight, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)


def _contiguous(state: Any) -> Any:
    if not isinstance(state, Mapping):
        return state
    return {key: value.contiguous() if _may_be_converted(value) else value for key, value in state.items()}


def _may_be_converted(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 4 and value.dtype is not CODES


def _is_channels_last(tensor: torch.Tensor) -> bool:
    # The layout of a 1x1 kernel, or of one channel, is both.
    return tensor.is_contiguous(memory_format=torch.channels_last)
