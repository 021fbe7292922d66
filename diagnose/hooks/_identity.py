"""Tells an object from others without keeping it alive."""

from __future__ import annotations

from typing import Any
from weakref import ref


def identity(known: Any) -> ref[Any] | int:
    """Returns what tells an object from others. A list allows no weak references: another one may have its
    identity when it is gone."""
    try:
        return ref(known)
    except TypeError:
        return id(known)


def is_same(known: ref[Any] | int | None, other: Any) -> bool:
    """Whether an object is the one of an identity."""
    return known() is other if isinstance(known, ref) else known == id(other)
