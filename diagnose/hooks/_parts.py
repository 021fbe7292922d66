"""Tells whether a batch that is in memory as a whole is trained in parts, one after the other."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

RECURRENT = (nn.RNNBase, nn.RNNCellBase)
"""Modules that go from step to step: of a sequence whose first axis is time, parts are no samples."""

LEAST_STEPS = 0.5
"""Part of the steps looked at in which a batch must be trained in parts."""

Batch = tuple[int, int, int, int]
"""A model, a tensor of a batch, the step, and how often optimizers had stepped: an update between two parts
makes them batches of their own."""


class Parts:
    """The parts of batches that models were given while gradients were on.

    Only tensors on a CPU are looked at, and nothing of what they hold is read.
    """

    def __init__(self) -> None:
        self._lengths: defaultdict[Batch, dict[int, int]] = defaultdict(dict)
        self._steps: dict[int, int] = {}
        self._recurs: dict[int, bool] = {}

    def note(self, model: nn.Module, given: torch.Tensor, step: int, num_updates: int) -> bool:
        """A model is trained on this: all of a batch, or some rows of it; returns whether it is some."""
        whole = _whole_of(given)
        if whole is None or self._is_recurrent(model):
            return False
        lengths = self._lengths[id(model), whole._cdata, step, num_updates]
        begins = int(given.storage_offset())
        if begins in lengths:  # the memory of an earlier batch, or the same rows once more
            lengths.clear()
        lengths[begins] = len(given)
        if sum(lengths.values()) == len(whole):
            self._steps[step] = max(len(lengths), self._steps.get(step, 0))
            lengths.clear()
        return True

    def of_a_batch(self, after: int, num_steps: int) -> float | None:
        """Returns how many parts a batch is trained in, in the mean; `None` where few batches are.

        Args:
            after: The step after which they count.
            num_steps: How many steps were looked at since.
        """
        counts = [count for step, count in self._steps.items() if step > after]
        return sum(counts) / len(counts) if counts and len(counts) >= LEAST_STEPS * num_steps else None

    def _is_recurrent(self, model: nn.Module) -> bool:
        if id(model) not in self._recurs:
            self._recurs[id(model)] = any(isinstance(module, RECURRENT) for module in model.modules())
        return self._recurs[id(model)]


def _whole_of(given: torch.Tensor) -> torch.Tensor | None:
    """Returns the tensor of which this is some of the rows, side by side and each of them whole; `None`
    where it is not."""
    plain = type(given) is torch.Tensor and given.layout is torch.strided and given.device.type == "cpu"
    if not plain or torch._C._functorch.is_functorch_wrapped_tensor(given):
        return None
    whole = given._base
    is_part = (
        whole is not None
        and 0 < given.dim() == whole.dim()
        and 0 < len(given) < len(whole)
        and (given.shape[1:], given.stride(), given.dtype) == (whole.shape[1:], whole.stride(), whole.dtype)
        and whole.stride(0) > 0
    )
    return whole if is_part else None
