"""Whether tensors can be updated element by element in the order in which they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def fits(together: Sequence[torch.Tensor]) -> bool:
    """Whether tensors lie alike in memory, without gaps: the n-th element of one then belongs to that of
    the others. Strides of dimensions of size 1 say nothing. One that is the negative of its memory does
    not."""
    first = together[0]
    if any(tensor.layout is not torch.strided or tensor.is_neg() for tensor in together):
        return False
    if len({tensor.shape for tensor in together}) != 1:
        return False
    span = 1 + sum((size - 1) * stride for size, stride in zip(first.shape, first.stride(), strict=True))
    if first.numel() and (span != first.numel() or _overlaps(first)):
        return False
    return len({_strides(tensor) for tensor in together}) == 1


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, for a tensor that spans as many places as it has elements."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return True
            expected *= size
    return False


def disjoint(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no two tensors without gaps share memory."""
    spans = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.numel())
    return all(start + nbytes <= following for (start, nbytes), (following, _) in pairwise(spans))
