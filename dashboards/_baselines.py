"""The gate's baselines beside the runs, as the page of the gate's history shows them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.gate.baseline import Baseline, Entry, load
from diagnose.gate.result import Metric

MAX_FILES = 50
"""One file per kind of machine: more than this is another folder."""

RATE = Metric.SAMPLES_PER_S


def baselines_beside(root: Path) -> dict[str, Baseline | str]:
    """Reads the baselines of the project whose runs lie under `root`: `.diagnose/baselines`.

    Returns:
        By the name of its file each baseline, or why it cannot be read.
    """
    found: dict[str, Baseline | str] = {}
    for path in sorted((root.parent / "baselines").glob("*.json"))[:MAX_FILES]:
        try:
            found[path.stem] = load(path)
        except (DiagnoseError, FileNotFoundError) as error:
            found[path.stem] = " ".join(str(error).split())
    return found


def rated(baseline: Baseline) -> tuple[Entry, ...]:
    """Returns the jobs whose samples/s were measured, oldest first."""
    return tuple(entry for entry in baseline.entries if RATE in entry.metrics)


def machine_in_words(hard: Mapping[str, Any]) -> str:
    """Says what the measurements hold for besides the command."""
    return ", ".join(
        f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
        for name, value in hard.items()
        if name != "command" and isinstance(value, str | int | float) and 0 < len(str(value)) < 40
    )
