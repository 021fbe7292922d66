"""Whether tensors are like those looked at before: one call for all, not one for each fact of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

try:
    from torch._C._dynamo.guards import TensorGuards  # what compiled graphs know their arguments by
except ImportError:  # it is no public part of torch, and one to come may lack it

    class TensorGuards:  # type: ignore[no-redef]
        """The same in Python."""

        def __init__(self, *tensors: torch.Tensor, **dynamic: None) -> None:
            self._facts = list(map(_facts, tensors))

        def check(self, *tensors: Any) -> bool:
            """Whether each is as the one before."""
            return all(isinstance(each, torch.Tensor) for each in tensors) and (
                list(map(_facts, tensors)) == self._facts
            )


class Likeness:
    """The type, dtype, device, layout, shape and strides of each of some tensors, and whether it is to be
    differentiated: not where it lies. Holds none of them.

    Args:
        tensors: All of them strided.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._num = len(tensors)
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def of(self, tensors: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are alike, one by one, and none is there twice. "No" may be wrong (in another
        autocast, say): whoever asks has to look closer then."""
        return len(tensors) == self._num and self._guards.check(*tensors)


def _facts(tensor: torch.Tensor) -> tuple[Any, ...]:
    stride = tensor.stride() if tensor.layout is torch.strided else None
    facts = (type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.shape, stride)
    return (*facts, tensor.requires_grad, tensor.is_neg(), tensor.is_conj())
