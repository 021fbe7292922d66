"""Reads the size of a batch off its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MemberDescriptorType, ModuleType
from typing import Any

import torch

from diagnose.hooks._held import attributes_of, has, item_of, values_of

MAX_DEPTH = 3
"""Nesting to look into: a dict in a tuple in a list is common, deeper is not."""

PLAIN = {str, bytes, bool, int, float, type(None)}
"""What holds nothing: most parts of samples without tensors."""

MAX_PARTS = 32
"""Where so many samples of a list hold no tensor, none of them does."""

MAX_LOOKS = 1000
"""Parts of a batch to look at for its first tensor: half a millisecond."""


def batch_size(batch: Any, asked: int = 0) -> tuple[int, int]:
    """Returns the samples and tokens of a batch, 0 for what it does not tell.

    The first tensor found counts: its first axis is the number of samples, unless it is one of a list of
    samples. It has tokens when it holds integers of shape `(B, T)`: `B * T`, padding included.

    Args:
        batch: A tensor, or nested sequences, mappings and dataclasses of tensors, as a loader yields or a
            model takes. Where there is no tensor in these, other objects of one's own count, as those
            that hold the nodes and edges of graphs.
        asked: The samples that the loader was to put into it, if known.
    """
    if type(batch) in (tuple, list) and batch and isinstance(batch[0], torch.Tensor):
        tensor: torch.Tensor | None = batch[0]  # nearly always
    else:
        tensor = first_tensor(batch)
        tensor = _held(batch) if tensor is None else tensor
    if tensor is None or not tensor.dim():
        return 0, 0
    if tensor.is_nested:  # of samples of different length
        whole = not tensor.is_floating_point() and tensor.dim() == 2 and tensor.dtype is not torch.bool
        return tensor.size(0), tensor.numel() if whole else 0
    if len(tensor) != asked and isinstance(batch, (tuple, list)):
        samples = _listed(batch, len(tensor), asked)
        if samples:
            return samples, 0
    if tensor.is_floating_point() or tensor.dim() != 2 or tensor.dtype is torch.bool:
        return len(tensor), 0
    return len(tensor), tensor.numel()


def _held(batch: Any) -> torch.Tensor | None:
    """Returns the first tensor that an object in a batch holds itself, or in a mapping that it holds; the
    weights of a model are no batch's, and an object of a list is one sample."""
    if isinstance(batch, list):
        return None
    each_part = parts_of(batch) if isinstance(batch, (tuple, Mapping)) else (batch,)
    for part in islice(each_part, MAX_PARTS):
        if isinstance(part, (torch.nn.Module, ModuleType)):
            continue
        for value in islice(attributes_of(part).values(), MAX_PARTS):
            inside = islice(values_of(value), MAX_PARTS) if isinstance(value, Mapping) else (value,)
            for each in inside:
                if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter):
                    return each
    return None


def is_on_device(batch: Any) -> bool:
    """Whether the first tensor found is on a device."""
    tensor = first_tensor(batch)
    return tensor is not None and tensor.device.type != "cpu"


def tells_samples_first(batch: Any, asked: int) -> bool:
    """Whether `batch[0].size(0)` is all that `batch_size` finds."""
    return (
        type(batch) in (tuple, list)
        and bool(batch)
        and isinstance(batch[0], torch.Tensor)
        and batch_size(batch, asked) == (batch[0].dim() and batch[0].size(0), 0)
        and batch[0].is_floating_point()
    )


def _listed(batch: Sequence[Any], length: int, asked: int) -> int:
    """Returns the number of samples in a list of them, or in one list of each of their parts, as detection
    has of images and boxes; 0 where they lie along a tensor's first axis.

    Args:
        batch: The batch.
        length: The first axis of its first tensor.
        asked: See `batch_size`.
    """
    parts = batch[0] if isinstance(batch[0], (tuple, list)) else ()
    for samples in (batch, parts):
        if len(samples) == asked > 1 and _are_alike(samples):
            return asked
    # The last batch of an epoch, or nobody knows what was asked. Two views of a batch are of equal length.
    if parts and isinstance(parts[0], torch.Tensor) and _are_alike(parts):
        others = [each for each in batch[1:] if isinstance(each, (tuple, list)) and len(each) == len(parts)]
        if others and not _are_as_long([*parts, *others[0]], length):
            return len(parts)
    if length > asked > len(batch) and _are_alike(batch) and not _are_as_long(batch, length):
        return len(batch)
    return 0


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether all are of one type, and tensors of one type and dimension."""
    kinds = {(type(v), v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v) for v in values}
    return len(kinds) == 1


def _are_as_long(values: Sequence[Any], length: int) -> bool:
    """Whether all are tensors whose first axis is so long."""
    return all(isinstance(v, torch.Tensor) and v.dim() > 0 and len(v) == length for v in values)


def first_tensor(batch: Any) -> torch.Tensor | None:
    """Returns the first tensor in nested sequences, mappings and dataclasses; of a mapping `input_ids`, if
    there."""
    return _first(batch, MAX_DEPTH, iter(range(MAX_LOOKS)))


def _first(batch: Any, depth: int, left: Iterator[int]) -> torch.Tensor | None:
    if isinstance(batch, torch.Tensor):
        return batch
    if not depth or type(batch) in PLAIN:
        return None
    if isinstance(batch, Mapping) and isinstance(ids := item_of(batch, "input_ids"), torch.Tensor):
        return ids
    parts = parts_of(batch)
    for part in islice(parts, MAX_PARTS) if isinstance(batch, list) else parts:
        if next(left, None) is None:
            return None
        tensor = _first(part, depth - 1, left)
        if tensor is not None:
            return tensor
    return None


def parts_of(batch: Any) -> Iterable[Any]:
    """Returns what a sequence, a mapping or an object of a dataclass holds; nothing of other objects. Runs
    no code of theirs but what goes through a sequence."""
    if isinstance(batch, (tuple, list)):
        return batch
    if isinstance(batch, Mapping):
        return values_of(batch)
    return _fields(batch) if has(batch, "__dataclass_fields__") else ()


def _fields(batch: Any) -> Iterator[Any]:
    """Yields what an object of a dataclass holds in its fields; what it would compute if asked for one, as
    properties do, is not asked for."""
    held = attributes_of(batch)
    for each in dataclasses.fields(type(batch)):
        if each.name in held:
            yield held[each.name]
        elif isinstance(getattr(type(batch), each.name, None), MemberDescriptorType):
            with contextlib.suppress(AttributeError):  # nothing is there yet
                yield object.__getattribute__(batch, each.name)  # a slot
