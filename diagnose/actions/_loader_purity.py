"""What making a batch must leave alone, for it to be the same wherever and however early it is made."""

from __future__ import annotations

import fcntl
import functools
import io
import os
import random
import stat
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_not
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch

MAX_DEPTH = 6
MAX_PARTS = 2000
"""A dataset is looked at so deep, and so many objects of it: transforms are nested, tables are long."""

MAX_ITEMS = 32
"""Of a longer container only the length is looked at: it holds samples, not settings."""

UNSHARABLE = ("lmdb", "sqlite3")
"""Modules whose open handles must not be used in a forked process, as their own documentation says."""

STDERR = 2

K = TypeVar("K")

Signature = dict[tuple[str, ...], Any]
"""What was seen of an object's parts, by the path of attributes that leads there."""


def random_states() -> dict[str, int]:
    """Returns a fingerprint of each of the process's global random number generators."""
    states = {
        "torch": hash(torch.get_rng_state().numpy().tobytes()),
        "random": hash(random.getstate()),
    }
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        _, keys, *rest = numpy_random.get_state()
        states["numpy.random"] = hash((keys.tobytes(), *rest))
    return states


def moved(before: Mapping[K, Any], after: Mapping[K, Any]) -> tuple[K, ...]:
    """Returns the names whose values differ."""
    return tuple(name for name in after if before.get(name, after[name]) != after[name])


def signature(dataset: Any) -> Signature:
    """Returns what tells whether an object, or what it is made of, has changed since.

    Seen are attributes, the lengths of containers, version counters of tensors, the state of random number
    generators, and what functions close over. Not seen are elements of arrays that are written in place.
    """
    seen: Signature = {}
    visited: set[int] = set()
    waiting: deque[tuple[tuple[str, ...], Any]] = deque([((), dataset)])
    while waiting and len(seen) < MAX_PARTS:
        path, value = waiting.popleft()
        state, parts = _part(value)
        seen[path] = state
        if len(path) < MAX_DEPTH and id(value) not in visited:
            visited.add(id(value))
            waiting.extend(((*path, name), part) for name, part in parts)
    return seen


def _part(value: Any) -> tuple[Any, Iterator[tuple[str, Any]]]:
    """Returns what is to be compared of one object, and the objects it is made of."""
    nothing: Iterator[tuple[str, Any]] = iter(())
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value, nothing
    if isinstance(value, torch.Tensor):
        return (id(value), value._version), nothing
    if isinstance(value, torch.Generator):
        return hash(value.get_state().numpy().tobytes()), nothing
    if isinstance(value, random.Random):
        return hash(value.getstate()), nothing
    if isinstance(value, type | ModuleType | BuiltinFunctionType):
        return id(value), nothing
    numpy_state = _numpy_state(value)
    if numpy_state is not None:
        return numpy_state, nothing
    if isinstance(value, Mapping):
        few = len(value) <= MAX_ITEMS
        return (id(value), len(value)), ((str(key), value[key]) for key in value) if few else nothing
    if isinstance(value, list | tuple | set | frozenset | deque):
        few = len(value) <= MAX_ITEMS
        return (id(value), len(value)), ((str(i), each) for i, each in enumerate(value)) if few else nothing
    if isinstance(value, FunctionType):
        cells = value.__closure__ or ()
        return id(value), ((str(i), cell.cell_contents) for i, cell in enumerate(cells) if _filled(cell))
    if isinstance(value, functools.partial):
        return id(value), iter([("func", value.func), ("args", value.args), ("keywords", value.keywords)])
    if hasattr(value, "__self__") and hasattr(value, "__func__"):
        return id(value.__func__), iter([("self", value.__self__)])
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        # A copy: looking at a part must not meet what the script's own threads add meanwhile.
        return (id(value), len(attributes)), iter(list(attributes.items()))
    return id(value), nothing


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a name that its function has not assigned yet
        return False


def _numpy_state(value: Any) -> Any:
    """Returns the comparable state of numpy's arrays and generators, `None` of what is neither."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not type(value).__module__.startswith("numpy"):
        return None
    if isinstance(value, numpy.ndarray):
        return id(value), value.shape
    generator = getattr(value, "bit_generator", None) or getattr(value, "_bit_generator", None)
    return str(generator.state) if generator is not None else None


def surface(dataset: Any) -> list[Any]:
    """Returns the values of the outermost attributes of a dataset, and of the one that it wraps."""
    values: list[Any] = []
    for _ in range(3):
        attributes = getattr(dataset, "__dict__", None)
        if not isinstance(attributes, dict):
            break
        values.extend(attributes.values())
        dataset = attributes.get("dataset")
    return values


def differ(before: list[Any], now: list[Any]) -> bool:
    """Whether an attribute was set or added between two looks at the surface of a dataset."""
    return len(now) != len(before) or any(map(is_not, now, before))


def unsharable(dataset: Any) -> str:
    """Returns the type of a handle in the dataset that a forked process must not use; empty if none."""
    for value in _objects(dataset):
        if type(value).__module__.partition(".")[0].strip("_") in UNSHARABLE:
            return f"{type(value).__module__}.{type(value).__qualname__}"
    return ""


def generators(sampler: Any) -> list[torch.Generator]:
    """Returns the random number generators of their own that a sampler, or what it is made of, holds."""
    found = [value for value in _objects(sampler) if isinstance(value, torch.Generator)]
    return [generator for generator in found if generator is not torch.default_generator]


def _objects(whole: Any) -> Iterator[Any]:
    """Yields an object and what it is made of, each once, as deep as `signature` looks."""
    waiting: deque[tuple[int, Any]] = deque([(0, whole)])
    visited: set[int] = set()
    while waiting and len(visited) < MAX_PARTS:
        depth, value = waiting.popleft()
        if id(value) not in visited:
            visited.add(id(value))
            yield value
            if depth < MAX_DEPTH:
                waiting.extend((depth + 1, part) for _, part in _part(value)[1])


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


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal bit for bit, types included; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.device == other.device
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


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


def leaves(batch: Any, found: Callable[[torch.Tensor], None]) -> None:
    """Calls `found` with each tensor of a batch."""
    if isinstance(batch, torch.Tensor):
        found(batch)
    elif isinstance(batch, Mapping):
        for each in batch.values():
            leaves(each, found)
    elif isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        for each in batch:
            leaves(each, found)
    elif isinstance(getattr(batch, "__dict__", None), dict):
        leaves(vars(batch), found)
