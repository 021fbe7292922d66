"""What kind an object is of, for one who wants to see what it holds."""

from __future__ import annotations

import ctypes
import functools
import sys
from array import array
from collections import deque
from types import ModuleType
from typing import Any

from diagnose.hooks._frames import USER, file_owner

KNOWN = frozenset({*sys.stdlib_module_names, "numpy", "pandas", "pyarrow", "torch"})
"""Packages whose compiled objects are looked into, or hold nothing that scripts change. pyarrow's tables
never change."""

PROXIES = "multiprocessing.managers"
"""Whose objects stand for those of another process."""

HEAP_TYPE = 1 << 9
"""Flag of CPython's for a type that is none of the interpreter's own."""

C_DATA: type = ctypes.Structure.__mro__[-2]
"""What all of ctypes' types are derived from, also those of `multiprocessing`'s values."""

BUFFERS = (bytearray, array, memoryview, C_DATA)
CONTAINERS = (dict, list, set, deque, *BUFFERS)

_whose_file = functools.lru_cache(maxsize=10_000)(file_owner)


def is_users(cls: type) -> bool:
    """Whether a class is defined in the script's own code."""
    module = sys.modules.get(cls.__module__)
    return cls.__module__ == "__main__" or (module is not None and is_users_module(module))


def is_users_module(module: ModuleType) -> bool:
    """Whether a module is the script's own code."""
    file = getattr(module, "__file__", None)
    return file is not None and _whose_file(file) == USER


def has_attributes(value: Any) -> bool:
    """Whether an object has a dictionary of attributes."""
    return isinstance(getattr(value, "__dict__", None), dict)


def slot_names(cls: type) -> list[str] | None:
    """Returns the names of the attributes for which a class of the script's has slots; `None` if it is not
    the script's, or is compiled."""
    slots = [vars(each)["__slots__"] for each in cls.__mro__ if "__slots__" in vars(each)]
    if not slots or not is_users(cls):
        return None
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return [name for name in names if name[:2] != "__"]


def is_opaque(value: Any) -> bool:
    """Whether nobody can see what an object holds, nor that it changes: a compiled one of a package that is
    not known, as a table of polars', or what stands for one in another process."""
    cls = type(value)
    if callable(value) or has_attributes(value) or slot_names(cls) is not None:
        return False
    home = cls.__module__.partition(".")[0]
    if home == "builtins":  # where types also claim to come from that were compiled from Rust
        return bool(cls.__flags__ & HEAP_TYPE)
    return home not in KNOWN or cls.__module__ == PROXIES


def can_change(value: Any) -> bool:
    """Whether an object may come to hold something else while it stays the same one: not so numbers, texts,
    paths, and tuples of those."""
    if isinstance(value, tuple | frozenset):
        return any(map(can_change, value))
    numpy = sys.modules.get("numpy")
    if is_index(value):
        return False
    if isinstance(value, CONTAINERS) or (numpy is not None and isinstance(value, numpy.ndarray)):
        return True
    return has_attributes(value) or slot_names(type(value)) is not None or is_opaque(value)


def is_index(value: Any) -> bool:
    """Whether it is an index of pandas': it never changes, only what it remembers of being asked."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(value, pandas.Index)


def arrays_in(value: Any) -> list[Any] | None:
    """Returns the arrays that pandas' tables, columns and arrays are made of, to which no attribute leads;
    `None` of anything else."""
    cls = type(value)
    if cls.__module__.startswith("pandas.core.internals"):
        return [block.values for block in getattr(value, "blocks", (value,))]
    is_pandas = cls.__module__.partition(".")[0] == "pandas"
    return [value._ndarray] if is_pandas and hasattr(cls, "_ndarray") else None
