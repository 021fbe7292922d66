"""Reads the size of a batch off its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

MAX_DEPTH = 3
"""Nesting to look into: a dict in a tuple in a list is common, deeper is not."""


def batch_size(batch: Any) -> tuple[int, int]:
    """Returns the samples and tokens of a batch, 0 for what it does not tell.

    The first tensor found counts: its first axis is the number of samples. It has tokens when it holds
    integers of shape `(B, T)`: `B * T`, padding included.

    Args:
        batch: A tensor, or nested sequences and mappings of tensors, as a loader yields or a model takes.
    """
    if type(batch) in (tuple, list) and batch and isinstance(batch[0], torch.Tensor):
        tensor: torch.Tensor | None = batch[0]  # nearly always
    else:
        tensor = first_tensor(batch)
    if tensor is None or not tensor.dim():
        return 0, 0
    if tensor.is_floating_point() or tensor.dim() != 2 or tensor.dtype is torch.bool:
        return len(tensor), 0
    return len(tensor), tensor.numel()


def is_on_device(batch: Any) -> bool:
    """Whether the first tensor found is on a device."""
    tensor = first_tensor(batch)
    return tensor is not None and tensor.device.type != "cpu"


def tells_samples_first(batch: Any) -> bool:
    """Whether `batch[0].size(0)` is all that `batch_size` finds."""
    return (
        type(batch) in (tuple, list)
        and bool(batch)
        and isinstance(batch[0], torch.Tensor)
        and batch_size(batch) == (batch[0].dim() and batch[0].size(0), 0)
        and batch[0].is_floating_point()
    )


def first_tensor(batch: Any, depth: int = MAX_DEPTH) -> torch.Tensor | None:
    """Returns the first tensor in nested sequences and mappings; of a mapping `input_ids`, if there."""
    if isinstance(batch, torch.Tensor):
        return batch
    if not depth:
        return None
    parts: Iterable[Any]
    if isinstance(batch, (tuple, list)):
        parts = batch
    elif isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, torch.Tensor):
            return ids
        parts = batch.values()
    else:
        return None
    for part in parts:
        tensor = first_tensor(part, depth - 1)
        if tensor is not None:
            return tensor
    return None
