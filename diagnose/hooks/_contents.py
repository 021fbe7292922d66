"""Tells by a few of their numbers whether a model was given the same samples again, in whatever tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

import torch

from diagnose.hooks._batch import MAX_DEPTH, first_tensor, parts_of

NUMBERS = 16
"""So many numbers of a sample are looked at: two that differ, differ in one of them."""

MOST_ROWS = 64
"""Of a larger batch so many samples, evenly spread, the last one among them."""

MOST_KEPT = 512
"""Of one that others are compared with, which may be parts of it, so many: in a millisecond."""

MOST_TENSORS = 8
"""A model is rarely given more that differ."""

LEAST_TOLD = 4
"""Different numbers that tell a sample; one that is no integer counts twice. Padding, black pictures and
one-hot vectors have fewer, and others look the same."""

LEAST_ROWS = 0.5
"""Part of the rows looked at that must be told."""

GOLDEN = 0.6180339887498949
"""Multiples of it, without their integer parts, lie evenly and in no pattern that a picture has."""

Key = tuple[Any, ...]
"""A tensor's number of elements and some of them; of one that is not read, its place and version."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a call was given.

    Attributes:
        whole: Stands for the first tensor, where rows do not; `None` where too little tells it from others.
        rows: One for each sample of it that was looked at; empty where too few are told.
        beside: For each of these, what the other tensors had in the same place.
        is_read: Whether the tensor was read. Else its place is only its own while it lives.
    """

    whole: Key | None
    rows: tuple[Key, ...]
    beside: Mapping[Key, frozenset[Key]]
    is_read: bool


def contents_of(given: Any, most_rows: int = MOST_ROWS) -> Contents | None:
    """Returns what the tensors of a call hold; `None` where there is none with samples.

    A tensor on a device, for which it would have to wait, and one whose numbers tell too little, is the
    same while it is the same memory, and nothing has written to that.

    Args:
        given: The arguments.
        most_rows: Samples to look at.
    """
    first = first_tensor(given)
    if first is None or not first.dim():
        return None
    tensors = islice(_tensors(given), MOST_TENSORS)
    others = [tensor for tensor in tensors if tensor is not first and _is_readable(tensor)]
    with torch.no_grad():
        looks = [_keys(other, most_rows) for other in others]
        wholes = frozenset(whole for whole, _ in looks)
        if not _is_readable(first):
            return _unread(first, wholes)
        whole, rows = _keys(first, most_rows)
    beside: dict[Key, frozenset[Key]] = {}
    for index, row in enumerate(rows):
        there = {
            of_rows[index] if other.dim() and len(other) == len(first) else of_whole
            for other, (of_whole, of_rows) in zip(others, looks, strict=True)
        }
        beside[row] = beside.get(row, frozenset()) | there
    beside[whole] = wholes
    told = tuple(row for row in rows if _tells(row))
    if len(told) < LEAST_ROWS * len(rows):
        told = ()
    if not told and not _tells(whole):
        return _unread(first, wholes)
    return Contents(whole if _tells(whole) else None, told, beside, is_read=True)


def look(tensor: torch.Tensor) -> Key:
    """Returns what changes when a tensor does: some of its numbers, or, where they are not read, its place
    and version."""
    with torch.no_grad():
        return _keys(tensor, 0)[0] if _is_readable(tensor) else _place(tensor)


def _unread(first: torch.Tensor, beside: frozenset[Key]) -> Contents:
    place = _place(first)
    return Contents(place, (), {place: beside}, is_read=False)


def _tensors(given: Any, depth: int = MAX_DEPTH) -> Iterator[torch.Tensor]:
    """Goes through all tensors in nested sequences, mappings and dataclasses."""
    if isinstance(given, torch.Tensor):
        yield given
    elif depth:
        for part in parts_of(given):
            yield from _tensors(part, depth - 1)


def _is_readable(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return (
        plain
        and tensor.device.type == "cpu"
        and tensor.numel() > 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _place(tensor: torch.Tensor) -> Key:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return "object", id(tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "object", id(tensor)
    version = 0 if tensor.is_inference() else tensor._version
    return "memory", tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), version


def _keys(tensor: torch.Tensor, most_rows: int) -> tuple[Key, list[Key]]:
    """Returns what stands for a tensor, and for each of its rows that is looked at."""
    length = len(tensor) if tensor.dim() and most_rows else 1
    num_rows = min(length, most_rows)
    places = _places(tensor.numel(), length, num_rows)
    numbers = tensor.detach().take(places).tolist()
    width = tensor.numel() // length
    in_row = min(NUMBERS, width)
    first = len(numbers) - num_rows * in_row
    rows = [
        (width, *numbers[start : start + in_row])
        for start in range(first, first + num_rows * in_row, in_row)
    ]
    return (tensor.numel(), *numbers[:first]), rows


@lru_cache(maxsize=256)
def _places(numel: int, length: int, num_rows: int) -> torch.Tensor:
    """Returns where to look in a tensor and then in some of its rows, in the order of its elements."""
    width = numel // length
    rows = [round(index * (length - 1) / max(1, num_rows - 1)) for index in range(num_rows)]
    in_row = _spread(width)
    places = _spread(numel) + [row * width + place for row in rows for place in in_row]
    return torch.tensor(places, dtype=torch.int64, device="cpu")


def _spread(numel: int) -> list[int]:
    """Returns places among so many elements."""
    if numel <= NUMBERS:
        return list(range(numel))
    return [int((index * GOLDEN) % 1 * numel) for index in range(1, NUMBERS + 1)]


def _tells(key: Key) -> bool:
    """Whether few other samples would look like this."""
    numbers = set(key[1:])
    fractions = (type(number) is float and not number.is_integer() for number in numbers)
    return len(numbers) >= LEAST_TOLD or len(numbers) + sum(fractions) >= LEAST_TOLD
