"""What the script's objects hold, found without running any code of theirs: a property may load a file, a
mapping read what it is asked for, and either may fail."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any


def has(part: Any, *names: str) -> bool:
    """Whether the type of an object defines all of these. Attributes of the object alone do not count, nor
    what `__getattr__` would make."""
    return all(any(name in vars(kind) for kind in type(part).__mro__) for name in names)


def attributes_of(part: Any) -> dict[str, Any]:
    """Returns what an object keeps in its `__dict__`; nothing where it has none."""
    try:
        held = object.__getattribute__(part, "__dict__")
    except AttributeError:
        return {}
    return held if isinstance(held, dict) else {}


def dicts_of(mapping: Mapping[Any, Any]) -> list[Mapping[Any, Any]]:
    """Returns what a mapping keeps its items in: itself, or the dictionaries that one of the script's own,
    or of a library's, has as attributes."""
    if isinstance(mapping, dict) or type(mapping) in (MappingProxyType, ChainMap):
        return [mapping]
    return [each for each in attributes_of(mapping).values() if isinstance(each, dict)]


def values_of(mapping: Mapping[Any, Any]) -> Iterable[Any]:
    """Returns the values of a mapping, those alone that it has in memory."""
    return chain.from_iterable(
        dict.values(each) if isinstance(each, dict) else each.values() for each in dicts_of(mapping)
    )


def item_of(mapping: Mapping[Any, Any], key: str) -> Any:
    """Returns what a mapping has in memory under a key, else `None`."""
    for each in dicts_of(mapping):
        found = dict.get(each, key) if isinstance(each, dict) else each.get(key)
        if found is not None:
            return found
    return None
