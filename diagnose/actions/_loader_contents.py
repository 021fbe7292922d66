"""Sums of what long tables hold: a dataset's labels, files, rows.

Each look takes a bounded time: of what is longer, evenly spaced elements are taken. To read an epoch of
samples from the table takes longer.
"""

from __future__ import annotations

import marshal
import zlib
from collections.abc import Sequence
from typing import Any

import torch

MAX_ELEMENTS = 1_000_000
MAX_BYTES = 32 << 20
MAX_INSIDE = 20_000
"""Elements, bytes of arrays, and objects inside of elements that one look takes: 0.1 s at most together."""

FEWEST = 64
"""Elements of each table that are taken however little room is left."""

BLOCK_BYTES = 1 << 12
CHUNK = 10_000

LONG_TEXT = 256
"""Longer texts are compared by length, identity and beginning: they cannot be changed in place."""

NUMBERS = {int, float, bool, type(None)}


class Room:
    """What is left to be taken in one look."""

    def __init__(self) -> None:
        self.elements = MAX_ELEMENTS
        self.bytes = MAX_BYTES
        self.inside = MAX_INSIDE


def contents_of_items(table: Any, room: Room) -> int:
    """Returns a checksum of a container's elements: of numbers their values, of other objects which they
    are, and of some of them what they hold."""
    items: Sequence[Any] = table if isinstance(table, list | tuple) else list(table)
    if isinstance(table, dict):
        items = [*table.keys(), *table.values()]
    picked = items[:: _stride(len(items), room.elements)]
    room.elements -= len(picked)
    total = 0
    for first in range(0, len(picked), CHUNK):
        chunk = picked[first : first + CHUNK]
        numbers = set(map(type, chunk)) <= NUMBERS
        total = zlib.crc32(marshal.dumps(list(chunk) if numbers else list(map(id, chunk)), 2), total)
        if not numbers:
            for each in chunk[:: _stride(len(chunk), room.inside)]:
                total = zlib.crc32(repr(_inside(each, room)).encode(errors="replace"), total)
    return total


def contents_of_array(array: Any, room: Room) -> int:
    """Returns a checksum of a NumPy array's bytes."""
    import numpy

    if array.dtype.hasobject:
        return contents_of_items(list(array.flat[:: _stride(array.size, room.elements)]), room)
    if not array.flags.c_contiguous:
        array = numpy.ascontiguousarray(array[:: _stride(array.nbytes, room.bytes)])
    return contents_of_bytes(array.reshape(-1).view(numpy.uint8), room) if array.nbytes else 0


def contents_of_bytes(buffer: Any, room: Room) -> int:
    """Returns a checksum of what lies in a row in memory."""
    with memoryview(buffer).cast("B") as flat:
        every = _stride(len(flat), room.bytes)
        room.bytes -= min(room.bytes, len(flat))
        if every == 1:
            return zlib.crc32(flat)
        total = 0
        for first in range(0, len(flat), BLOCK_BYTES * every):
            total = zlib.crc32(flat[first : first + BLOCK_BYTES], total)
        return zlib.crc32(flat[-BLOCK_BYTES:], total)


def _stride(length: int, room: int) -> int:
    return max(1, -(-length // max(room, FEWEST)))


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
        if value.nbytes <= LONG_TEXT:
            return value.tobytes()
        return id(value), zlib.crc32(value.reshape(-1)[:LONG_TEXT].tobytes())
    held = vars(value) if isinstance(getattr(value, "__dict__", None), dict) else value
    if isinstance(held, dict):
        held = [*held.keys(), *held.values()]
    if not depth or not isinstance(held, list | tuple):
        return id(value)
    return len(held), [_inside(each, room, depth - 1) for each in held[:: _stride(len(held), room.inside)]]
