"""What making a batch must leave alone, for it to be the same wherever and however early it is made."""

from __future__ import annotations

import fcntl
import io
import os
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, MutableSet, Sequence
from contextlib import suppress
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch

from diagnose.actions._loader_parts import Look

UNSHARABLE = ("lmdb", "sqlite3")
"""Modules whose open handles must not be used in a forked process, as their own documentation says."""

TORCHS = "torch-shm-dir"
"""Part of the name of the socket to the process that counts who uses torch's shared memory."""

STDERR = 2


def unsharable(dataset: Any) -> str:
    """Returns the type of a handle in the dataset that a forked process must not use; empty if none."""
    for value in Look(dataset, closely=False).objects:
        if type(value).__module__.partition(".")[0].strip("_") in UNSHARABLE:
            return f"{type(value).__module__}.{type(value).__qualname__}"
    return ""


def generators(sampler: Any) -> list[torch.Generator]:
    """Returns the random number generators of their own that a sampler, or what it is made of, holds."""
    objects = Look(sampler, closely=False).objects
    found = [value for value in objects if isinstance(value, torch.Generator)]
    return [generator for generator in found if generator is not torch.default_generator]


def iterators(sampler: Any) -> list[Any]:
    """Returns the iterators that a sampler, or what it is made of, holds, and whose place nobody sees. That
    of a class with a `__next__` in Python is seen: in its attributes."""
    objects = Look(sampler, closely=False).objects
    found = [value for value in objects if issubclass(type(value), Iterator)]
    return [value for value in found if not isfunction(type(value).__next__)]


def file_positions() -> dict[int, tuple[str, int]]:
    """Returns path and position of each regular file that this process has open to read, by descriptor.

    A forked process shares the positions: one that seeks and reads moves the file under the other's feet.
    """
    positions = {}
    for entry in Path("/proc/self/fd").iterdir() if Path("/proc/self/fd").is_dir() else ():
        try:
            path, descriptor = Path(os.readlink(entry)), int(entry.name)
            reads = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if descriptor > STDERR and reads and stat.S_ISREG(os.fstat(descriptor).st_mode):
                positions[descriptor] = (str(path), os.lseek(descriptor, 0, io.SEEK_CUR))
        except OSError:  # the descriptor of the listing itself, or one that cannot seek
            continue
    return positions


def open_sockets() -> dict[int, int]:
    """Returns the descriptors of the sockets that this process has open, each with its inode.

    A forked process has them, too, and whatever it says there is said in the other's name.
    """
    found = {}
    for entry in os.listdir("/proc/self/fd") if Path("/proc/self/fd").is_dir() else ():
        with suppress(OSError):  # the descriptor of the listing itself
            status = os.fstat(int(entry))
            if int(entry) > STDERR and stat.S_ISSOCK(status.st_mode) and not _is_torchs(int(entry)):
                found[int(entry)] = status.st_ino
    return found


def _is_torchs(descriptor: int) -> bool:
    with suppress(OSError), socket.fromfd(descriptor, socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        return TORCHS in str(connection.getpeername())
    return False


def silence(sockets: Mapping[int, int]) -> None:
    """In a forked process: what is written to sockets of the one that it came from goes nowhere.

    Args:
        sockets: What `open_sockets` returned there. A descriptor that is another one by now is left alone.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor, inode in sockets.items():
        with suppress(OSError):
            if os.fstat(descriptor).st_ino == inode:
                os.dup2(nowhere, descriptor)
    os.close(nowhere)


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal bit for bit, types and layout in memory included; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.device == other.device
            and _layout(one) == _layout(other)
            and _equal(one, other)
        )
    if type(one).__module__ == "numpy":
        return bool(
            one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
        )
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, str | bytes | int):
        return bool(one == other)
    if isinstance(one, float):
        return bool(one.hex() == other.hex())
    if isinstance(one, Sequence):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(getattr(one, "__dict__", None), dict):
        return same(vars(one), vars(other))
    return bool(one == other)


def _layout(tensor: torch.Tensor) -> list[int]:
    """Returns the strides that say where an element lies: what is computed from it is rounded by them."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def leaves(batch: Any) -> Iterator[torch.Tensor]:
    """Yields each tensor of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for each in batch.values():
            yield from leaves(each)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for each in batch:
            yield from leaves(each)
    elif isinstance(getattr(batch, "__dict__", None), dict):
        yield from leaves(vars(batch))


def overlap(one: Any, other: Any, elsewhere: Any) -> bool:
    """Whether two batches have something in common that can be written to. What is in one from another
    process, too, is no such thing: a class, a member of an enumeration."""
    ours, theirs = _places(one), _places(other)
    return not ours.keys().isdisjoint(theirs.keys() - _places(elsewhere).keys())


def _places(batch: Any) -> dict[int, Any]:
    """Returns what of a batch can be written to, by its address; of tensors and arrays, by that of their
    elements."""
    found: dict[int, Any] = {}
    numpy, waiting = sys.modules.get("numpy"), [batch]
    while waiting:
        value = waiting.pop()
        if value is None or isinstance(value, str | bytes | int | float | complex):
            continue
        if isinstance(value, torch.Tensor):
            if value.numel():
                found[value.data_ptr()] = value
        elif numpy is not None and isinstance(value, numpy.ndarray):
            if value.size and value.flags.writeable:
                found[value.__array_interface__["data"][0]] = value
            if value.dtype.hasobject:
                waiting.extend(value.flat)
        elif isinstance(value, tuple | frozenset):
            waiting.extend(value)
        elif id(value) not in found:
            attributes = getattr(value, "__dict__", None)
            parts: Iterable[Any]
            if isinstance(value, Mapping):
                parts = value.values()
            elif isinstance(value, MutableSequence | MutableSet):
                parts = value
            elif isinstance(attributes, dict):
                parts = attributes.values()
            else:
                continue
            found[id(value)] = value
            waiting.extend(parts)
    return found
