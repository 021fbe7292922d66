"""The deep window for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from diagnose.core.deep_window import DeepWindow


def window_as_json(window: DeepWindow | None) -> dict[str, Any] | None:
    """Returns a deep window as JSON; `null` where none was taken. Times are in nanoseconds, as their keys
    say, and of all its recorded steps together."""
    if window is None:
        return None
    return {**asdict(window), "mfu": window.mfu}
