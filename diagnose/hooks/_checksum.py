"""A checksum of what a sample holds, to tell whether it comes out as before. None of its code is run."""

from __future__ import annotations

import contextlib
import os
import zlib
from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from struct import calcsize
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from diagnose.hooks._held import attributes_of, has, values_of

MAX_PART_BYTES = 1 << 20
"""So much of each part of a watched sample is compared."""

MAX_DEPTH = 4

MAX_PARTS = 10_000
"""A watched sample of more is not compared: so many take some milliseconds."""

POINTER = calcsize("P")
"""Bytes that an attribute takes of an object with slots, and its `__dict__` of another."""

SEQUENCES = (list, tuple, range, deque, array, bytearray)
"""What hands out its parts by code that is none of the script's."""


def checksum(sample: Any) -> int | None:
    """Returns a checksum of the tensors, arrays, images, texts and numbers in a sample, or in attributes of
    objects in it; `None` if it holds anything else, more than `MAX_PARTS`, or what is not in the memory of
    the host. The sample is left as it is."""
    return _checksum(sample, MAX_DEPTH, iter(range(MAX_PARTS)))


def _checksum(sample: Any, depth: int, left: Iterator[int]) -> int | None:
    if next(left, None) is None:
        return None
    if isinstance(sample, (str, bytes)):
        sample = sample[:MAX_PART_BYTES]
    if isinstance(sample, (str, int, float, bool, type(None))):
        return zlib.crc32(repr(sample).encode())
    if isinstance(sample, bytes):
        return zlib.crc32(sample)
    if isinstance(sample, (type, FunctionType, BuiltinFunctionType)):
        return zlib.crc32(sample.__qualname__.encode())
    if isinstance(sample, os.PathLike):
        return zlib.crc32(repr(os.fspath(sample)).encode())
    if isinstance(sample, Mapping):
        held = list(islice(values_of(sample), MAX_PARTS))
        sample = held if held or isinstance(sample, dict) else _attributes(sample)
    elif isinstance(sample, torch.Tensor):
        sample = _array_of(sample)
        if sample is None:
            return None
    is_picture = has(sample, "mode") or "mode" in attributes_of(sample)
    if has(sample, "tobytes") and (is_picture or has(sample, "dtype")):
        if is_picture and getattr(sample, "tile", None):
            return None  # a picture that is still to be decoded: the script may want it smaller
        if has(sample, "itemsize", "reshape", "ndim"):
            sample = _first_of(sample, sample.size, MAX_PART_BYTES // max(1, sample.itemsize))
        return zlib.crc32(sample.tobytes()[:MAX_PART_BYTES])
    if not isinstance(sample, SEQUENCES):
        sample = _attributes(sample)
        if not sample:
            return None
    if not depth:
        return None
    sums = []
    for part in sample:
        sums.append(_checksum(part, depth - 1, left))
        if sums[-1] is None:
            return None
    return zlib.crc32(repr(sums).encode())


def _array_of(tensor: Any) -> Any:
    """Returns the first elements of a tensor in memory of their own: a storage that NumPy has seen can
    never be resized again. `None` on a device, for which it would have to wait; of sparse or bfloat16."""
    try:
        if tensor.device.type != "cpu":
            return None
        count = MAX_PART_BYTES // max(1, tensor.element_size())
        return _first_of(tensor.detach(), tensor.numel(), count).clone().numpy()
    except (AttributeError, RuntimeError, TypeError):
        return None


def _first_of(values: Any, size: int, count: int) -> Any:
    """Returns the first elements of a tensor or an array. One whose rows lie apart is not put together as
    a whole for that."""
    if values.ndim > 1 and size > count:
        rows = -(-count * len(values) // size)
        values = values[: max(1, rows)]
    return values.reshape(-1)[:count]


def _attributes(part: Any) -> list[Any]:
    """Returns what an object keeps under names; nothing of one that keeps more than that, as types written
    in C do: those are larger than their attributes are. Runs no code of the object's."""
    kind = type(part)
    slots = [name for each in kind.__mro__ for name in _slots(each)]
    named = len(slots) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    if kind.__itemsize__ or kind.__basicsize__ > object.__basicsize__ + POINTER * named:
        return []
    held = list(object.__getattribute__(part, "__dict__").values()) if kind.__dictoffset__ else []
    for name in slots:
        with contextlib.suppress(AttributeError):  # nothing is there yet
            held.append(object.__getattribute__(part, name))
    return held


def _slots(kind: type) -> list[str]:
    """Returns the names of a class's own slots that hold attributes, as attributes are named."""
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    owner = kind.__name__.lstrip("_")
    return [
        f"_{owner}{name}" if name.startswith("__") and not name.endswith("__") else name
        for name in names
        if name not in ("__dict__", "__weakref__")
    ]
