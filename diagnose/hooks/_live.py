"""The script's live optimizers, which several hooks look at."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LiveOptimizer:
    """An optimizer of the script's, which it may drop at any time.

    Attributes:
        reference: Weak.
        file: Where it was made; empty when unknown.
        line: Its line.
        stepped: Whether its `step()` was called.
    """

    reference: weakref.ref[Any]
    file: str = ""
    line: int = 0
    stepped: bool = False


known: list[LiveOptimizer] = []
"""In the order in which they were made, or first stepped."""


def find(optimizer: Any) -> LiveOptimizer | None:
    """Returns what is known of an optimizer."""
    return next((live for live in known if live.reference() is optimizer), None)


def parameters() -> Iterator[Any]:
    """Every parameter that some optimizer updates."""
    for live in known:
        optimizer = live.reference()
        for group in getattr(optimizer, "param_groups", ()):
            yield from group["params"]
