"""Calls a function when a module has been imported, without importing it."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def after_import(name: str, action: Callable[[], None]) -> Callable[[], None]:
    """Calls `action` once the module `name` has been executed; at once if it has been already.

    Returns:
        A function that takes the wish back.
    """
    if name in sys.modules:
        action()
        return lambda: None
    _waiting.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return functools.partial(_forget, name, action)


def _forget(name: str, action: Callable[[], None]) -> None:
    if action in _waiting.get(name, ()):
        _waiting[name].remove(action)
        if not _waiting[name]:
            del _waiting[name]
    _leave_if_idle()


def _leave_if_idle() -> None:
    if not _waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the awaited modules as Python would, and adds one call after their execution.

    Removes itself when nothing is awaited any more.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _waiting:
            return None
        spec = _find(name, path, target)
        loader: Any = spec.loader if spec is not None else None
        original = getattr(loader, "exec_module", None)
        if original is None:
            return spec

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            # Only now: `find_spec` alone asks whether a module is there, as Hugging Face's libraries do.
            actions = _waiting.pop(name, [])
            _leave_if_idle()
            for action in actions:
                action()

        with contextlib.suppress(AttributeError):  # a loader without a dict, as of built-in modules
            loader.exec_module = exec_module
        return spec


def _find(
    name: str, path: Sequence[str] | None, target: ModuleType | None
) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        if finder is _finder:
            continue
        find_spec = getattr(finder, "find_spec", None)
        spec: importlib.machinery.ModuleSpec | None = find_spec(name, path, target) if find_spec else None
        if spec is not None:
            return spec
    return None


_finder = _Finder()
