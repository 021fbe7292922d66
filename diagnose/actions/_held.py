"""What a model holds beyond modules, and whether a call changes it: nobody could put that back."""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

MAX_DEPTH = 4
MAX_PARTS = 2000
MAX_ITEMS = 10_000
"""So deep is looked, and at so many objects; of a longer container only the length is compared."""

MAX_BYTES = 1 << 20
"""Nothing is compared of a longer array of NumPy's."""

CONTAINERS = (dict, list, tuple, set, frozenset, deque)
PLAIN = (type(None), bool, int, float, complex, str, bytes)
TORCHS = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
"""Attributes that each module has."""


class Held:
    """What a model holds now.

    Attributes of modules themselves are left out, with what their containers hold: `_untouched` puts them
    back. So are classes, functions, and objects of torch's and of ours. Containers that the `forward` of a
    module names, as globals or from around it, belong to it. No code of the script's is run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[str, Any] = {}
        self._alive: list[Any] = []  # an identity tells an object only as long as it is there
        self._waiting: deque[tuple[str, int, Any]] = deque()
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if name not in TORCHS:
                    self._wait_for(f"{path}.{name}".strip("."), 0, value)
            for name, value in _named_by(type(module).forward):
                self._wait_for(name, 1, value)
        met: set[int] = set()
        while self._waiting and len(met) < MAX_PARTS:
            path, depth, value = self._waiting.popleft()
            if id(value) not in met:
                met.add(id(value))
                self._look(path, depth, value)

    def changed(self, now: Held) -> str:
        """Returns the path of something that is different; empty where nothing is."""
        return next((path for path, seen in self._seen.items() if now._seen.get(path) != seen), "")

    def _look(self, path: str, depth: int, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if depth:
                self._seen[path] = value._version
            return
        size, parts = _parts(value)
        if depth or not isinstance(value, CONTAINERS):
            self._seen[path] = size, {name: _compared(part) for name, part in parts.items()}
        for name, part in parts.items():
            self._wait_for(f"{path}.{name}", depth + 1, part)

    def _wait_for(self, path: str, depth: int, value: Any) -> None:
        if not isinstance(value, PLAIN):
            self._alive.append(value)
            if depth <= MAX_DEPTH:
                self._waiting.append((path, depth, value))


def _named_by(forward: Any) -> Iterator[tuple[str, Any]]:
    """Containers outside of a model that a function of its own uses by name."""
    code = getattr(forward, "__code__", None)
    if code is None or str(forward.__module__).partition(".")[0] == "torch":
        return
    found = [(name, forward.__globals__.get(name)) for name in code.co_names]
    for name, cell in zip(code.co_freevars, forward.__closure__ or (), strict=False):
        with contextlib.suppress(ValueError):  # not filled yet
            found.append((name, cell.cell_contents))
    yield from ((name, value) for name, value in found if isinstance(value, CONTAINERS))


def _parts(value: Any) -> tuple[Any, dict[str, Any]]:
    """Returns what is to be compared of an object itself, and what it is made of."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return hash(value.tobytes()) if value.nbytes <= MAX_BYTES else None, {}
    kind: Any = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)
    if kind is not None:
        size = kind.__len__(value)
        if size > MAX_ITEMS:
            return size, {}
        items = dict.items(value) if kind is dict else enumerate(kind.__iter__(value))
        return size, {str(_compared(name)): part for name, part in list(items)}
    attributes = getattr(value, "__dict__", None)
    is_theirs = type(value).__module__.partition(".")[0] not in ("torch", "diagnose")
    if type(attributes) is dict and is_theirs and not isinstance(value, type | nn.Module):
        return len(attributes), dict(attributes)
    return None, {}


def _compared(part: Any) -> Any:
    """A plain value, or the identity of an object."""
    if not isinstance(part, PLAIN):
        return id(part)
    return part if part == part else "not a number"
