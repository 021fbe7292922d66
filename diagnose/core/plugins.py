"""Finds the plugins of a folder by looking into it: one file, one subclass, no list to keep."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import TypeVar

T = TypeVar("T")


def discover(package: ModuleType, base: type[T]) -> dict[str, T]:
    """Instantiates the one subclass of `base` in each file of `package`.

    Files that start with an underscore, and `base.py`, are not plugins. The name of a plugin is its file's
    name with dashes: `rules/slow_collate.py` holds `slow-collate`.

    Args:
        package: An imported package whose folder holds one plugin per file.
        base: The class that each plugin subclasses.

    Returns:
        The plugins by name, in the order of their names.

    Raises:
        TypeError: If a file does not define exactly one subclass of `base`.
    """
    found: dict[str, T] = {}
    for info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        if info.name.startswith("_") or info.name == "base":
            continue
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        found[info.name.replace("_", "-")] = only_subclass(module, base)()
    return found


def only_subclass(module: ModuleType, base: type[T]) -> type[T]:
    """Returns the one subclass of `base` that `module` defines.

    Raises:
        TypeError: If it does not define exactly one.
    """
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise TypeError(f"{module.__name__} defines {len(classes)} {base.__name__}s, not one")
    return classes[0]
