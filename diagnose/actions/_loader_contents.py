"""Sums of what long tables hold: a dataset's labels, files, rows.

Each look takes a bounded time: of what is longer, evenly spaced elements are taken. To read an epoch of
samples from the table takes longer.
"""

from __future__ import annotations

import marshal
import zlib
from collections import deque
from collections.abc import Sequence
from pickle import PickleBuffer
from typing import Any

import torch

from diagnose.actions._loader_objects import (
    BUFFERS,
    arrays_in,
    can_change,
    has_attributes,
    is_index,
    slot_names,
)

MAX_ELEMENTS = 1_000_000
MAX_BYTES = 32 << 20
MAX_INSIDE = 20_000
"""Elements, bytes of arrays, and objects inside of elements that one look takes: 0.1 s at most together."""

MANY_BYTES = 256 << 20
"""Bytes of arrays where a look comes once in an epoch, and what it leaves out forbids the action: 0.3 s."""

FEWEST = 64
"""Elements of each table that are taken however little room is left."""

BLOCK_BYTES = 1 << 12
CHUNK = 10_000

LONG_TEXT = 256
"""Longer texts are compared by length, identity and beginning: they cannot be changed in place."""

NUMBERS = {int, float, bool, type(None)}
PLAIN = {*NUMBERS, str, bytes}


class Room:
    """What is left to be taken in one look.

    Args:
        most_bytes: Of arrays.

    Attributes:
        left_out: Whether something was not looked at that may change while all that was stays the same.
    """

    def __init__(self, most_bytes: int) -> None:
        self.elements = MAX_ELEMENTS
        self.bytes = most_bytes
        self.inside = MAX_INSIDE
        self.left_out = False


def contents_of_items(table: Any, room: Room) -> int:
    """Returns a checksum of a container's elements: of numbers their values, of other objects which they
    are, and of some of them what they hold."""
    items: Sequence[Any] = table if isinstance(table, list | tuple) else list(table)
    if isinstance(table, dict):
        items = [*table.keys(), *table.values()]
    every = _stride(len(items), room.elements)
    picked = items[::every]
    room.left_out |= every > 1
    room.elements -= len(picked)
    total = 0
    for first in range(0, len(picked), CHUNK):
        chunk = picked[first : first + CHUNK]
        numbers = set(map(type, chunk)) <= NUMBERS
        total = zlib.crc32(marshal.dumps(list(chunk) if numbers else list(map(id, chunk)), 2), total)
        if not numbers:
            for each in _picked(chunk, room):
                total = zlib.crc32(repr(_inside(each, room)).encode(errors="replace"), total)
    return total


def contents_of_array(array: Any, room: Room) -> int:
    """Returns a checksum of a NumPy array's bytes; a mapped file is not read."""
    import numpy

    if isinstance(array, numpy.memmap):
        return 0
    if array.dtype.hasobject:
        every = _stride(array.size, room.elements)
        room.left_out |= every > 1
        return contents_of_items(list(array.flat[::every]), room)
    if array.flags.f_contiguous:
        array = array.T
    if not array.flags.c_contiguous:
        every = _stride(array.nbytes, room.bytes)
        room.left_out |= every > 1
        array = numpy.ascontiguousarray(array[::every])
    return contents_of_bytes(array.reshape(-1).view(numpy.uint8), room) if array.nbytes else 0


def contents_of_bytes(buffer: Any, room: Room) -> int:
    """Returns a checksum of what lies in a row in memory."""
    with PickleBuffer(buffer).raw() as flat:
        every = _stride(len(flat), room.bytes)
        room.bytes -= min(room.bytes, len(flat))
        if every == 1:
            return zlib.crc32(flat)
        room.left_out = True
        total = 0
        for first in range(0, len(flat), BLOCK_BYTES * every):
            total = zlib.crc32(flat[first : first + BLOCK_BYTES], total)
        return zlib.crc32(flat[-BLOCK_BYTES:], total)


def _stride(length: int, room: int) -> int:
    return max(1, -(-length // max(room, FEWEST)))


def _picked(items: Sequence[Any], room: Room) -> Sequence[Any]:
    """Returns the items that are looked into. The others are taken to be like them."""
    every = _stride(len(items), room.inside)
    picked = items[::every]
    if every > 1 and not room.left_out:
        room.left_out = not set(map(type, picked)) <= PLAIN and any(map(can_change, picked))
    return picked


def _inside(value: Any, room: Room, depth: int = 3) -> Any:
    """Returns what is to be compared of one element."""
    room.inside -= 1
    if isinstance(value, str | bytes):
        return value if len(value) <= LONG_TEXT else (len(value), id(value), value[:LONG_TEXT])
    if type(value) in NUMBERS:
        return value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        small = value.nbytes <= LONG_TEXT and not value.dtype.hasobject
        return value.tobytes() if small else (id(value), contents_of_array(value, room))
    if isinstance(value, BUFFERS):
        return id(value), contents_of_bytes(value, room)
    held = _held(value) if depth else None
    if held is None:
        room.left_out |= can_change(value)
        return id(value)
    return len(held), [_inside(each, room, depth - 1) for each in _picked(held, room)]


def _held(value: Any) -> Sequence[Any] | None:
    """Returns what an object is made of, if it can be seen."""
    held: Sequence[Any] | None = arrays_in(value)
    if held is not None or is_index(value):
        return held
    if isinstance(value, dict):
        held = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        held = list(value)
    names = slot_names(type(value))
    if names is not None:
        held = [*(held or ()), *(getattr(value, name, None) for name in names)]
    if has_attributes(value):
        held = [*(held or ()), *vars(value), *vars(value).values()]
    return held
