"""The gate's baselines as this folder's page reads them: small JSON files that a person may have edited."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_FILES = 50
"""One file per kind of machine: more than this is another folder."""
MAX_BYTES = 4_000_000
"""The gate keeps 30 entries of a few hundred bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One `baseline update`: what one commit was measured at.

    Attributes:
        when: ISO 8601.
        commit: The commit's hash; empty when it was not known.
        branch: Its branch.
        samples_per_s: Median of its runs.
        runs: Each run's.
    """

    when: str
    commit: str
    branch: str
    samples_per_s: float
    runs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What is remembered of one kind of machine.

    Attributes:
        key: Name of the file.
        command: What was run; empty where the file does not say.
        machine: What else the measurements hold for, in words.
        entries: Oldest first.
        trouble: Why the file cannot be read; empty when it can.
    """

    key: str
    command: str = ""
    machine: str = ""
    entries: tuple[Entry, ...] = ()
    trouble: str = ""


def baselines_beside(root: Path) -> list[Baseline]:
    """Reads the baselines of the project whose runs lie under `root`: `.diagnose/baselines`."""
    folder = root.parent / "baselines"
    return [_baseline(path) for path in sorted(folder.glob("*.json"))[:MAX_FILES]]


def _baseline(path: Path) -> Baseline:
    try:
        if path.stat().st_size > MAX_BYTES:
            return Baseline(key=path.stem, trouble="the file is too large for a baseline")
        stored = json.loads(path.read_text(encoding="utf-8"))
        entries = tuple(filter(None, map(_entry, stored["entries"])))
        hard = stored.get("fingerprint", {}).get("hard", {})
        command = str(hard.get("command") or "")
        machine = ", ".join(
            f"{name.replace('_', ' ')} {f'{value:g}' if isinstance(value, float) else value}"
            for name, value in hard.items()
            if name != "command" and _is_short(value)
        )
    except OSError as error:
        return Baseline(key=path.stem, trouble=error.strerror or "the file cannot be read")
    except (ValueError, TypeError, KeyError, AttributeError):
        return Baseline(key=path.stem, trouble="this is not the JSON of a baseline")
    return Baseline(key=path.stem, command=command, machine=machine, entries=entries)


def _entry(stored: Mapping[str, Any]) -> Entry | None:
    """Returns an entry, or nothing where samples/s were not measured."""
    rate = _rate(stored)
    if rate is None:
        return None
    return Entry(
        when=str(stored.get("when", "")),
        commit=str(stored.get("commit") or ""),
        branch=str(stored.get("branch") or ""),
        samples_per_s=rate,
        runs=tuple(filter(None, map(_rate, stored.get("runs", ())))),
    )


def _rate(stored: Mapping[str, Any]) -> float | None:
    value = stored.get("metrics", stored).get("samples_per_s")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        return None
    return float(value)


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float) and 0 < len(str(value)) < 40
