"""What earlier jobs measured on machines like this one, in a small file that is reviewed like code."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.core.phases import Phase
from diagnose.gate.fingerprint import Fingerprint, differences
from diagnose.gate.result import MeasuredRun, Metric

SCHEMA = 1

FOLDER = Path(".diagnose") / "baselines"

GIT_IGNORES = "*\n!/.gitignore\n!/baselines/\n!/baselines/*.json\n"
"""Of everything under `.diagnose`, git is to see the baselines alone."""

MOST_ENTRIES = 30

COMPARABLE = tuple(metric for metric in Metric if metric is not Metric.INSTRUCTIONS)
"""Metrics of a step, or of a process. Instructions are of a whole run, and jobs differ in how many steps
theirs have."""

RUNS = 3
"""Runs in a job; their median is what the job measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one job measured.

    Attributes:
        when: ISO 8601 with time zone.
        metrics: Median over the job's runs.
        runs: The same of each run.
        phase_ms: Milliseconds per step that each phase usually took; empty where that was not kept.
    """

    when: str
    commit: str
    branch: str
    metrics: Mapping[Metric, float]
    runs: tuple[Mapping[Metric, float], ...]
    phase_ms: Mapping[Phase, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The last jobs on one kind of machine, oldest first."""

    fingerprint: Fingerprint
    entries: tuple[Entry, ...] = ()

    def with_entry(self, entry: Entry) -> Baseline:
        """Returns this with one more job, without those that are too old."""
        return replace(self, entries=(*self.entries, entry)[-MOST_ENTRIES:])


def entry_of(
    runs: Sequence[MeasuredRun],
    *,
    when: str,
    commit: str,
    branch: str,
    phase_ms: Mapping[Phase, float],
) -> Entry:
    """Returns what a job's runs come to: each comparable metric that all of them have."""
    common = [metric for metric in COMPARABLE if all(metric in run.figures for run in runs)]
    return Entry(
        when=when,
        commit=commit,
        branch=branch,
        metrics={metric: statistics.median(run.figures[metric] for run in runs) for metric in common},
        runs=tuple({metric: run.figures[metric] for metric in common} for run in runs),
        phase_ms=phase_ms,
    )


def mismatch(baseline: Baseline, now: Fingerprint) -> tuple[str, ...]:
    """Says in which hard facts this machine, or the work of a step, differs from the baseline's."""
    return differences(baseline.fingerprint.hard, _known_to(baseline.fingerprint.hard, now.hard))


def soft_mismatch(baseline: Baseline, now: Fingerprint) -> tuple[str, ...]:
    """Says the same of the soft facts."""
    return differences(baseline.fingerprint.soft, _known_to(baseline.fingerprint.soft, now.soft))


def _known_to(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the facts that an earlier version of ours, which knew fewer of them, has written down."""
    return {name: value for name, value in now.items() if name in before}


def load(path: Path) -> Baseline:
    """Reads a baseline.

    Raises:
        DiagnoseError: If the file is damaged or of a newer version.
        FileNotFoundError: If there is none.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] > SCHEMA:
            raise DiagnoseError(
                f"{path}: written by a newer diagnose: format {data['schema']}, not {SCHEMA}.\n"
                "Upgrade: pip install --upgrade torch-diagnose"
            )
        return Baseline(
            fingerprint=Fingerprint(**data["fingerprint"]),
            entries=tuple(_entry(entry) for entry in data["entries"]),
        )
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DiagnoseError(
            f"{path} is not a baseline ({type(error).__name__}: {error}).\n"
            "Take it out of the way, and write one anew: diagnose baseline update -- train.py"
        ) from error


def save(baseline: Baseline, path: Path) -> None:
    """Writes a baseline whole or not at all, and lets git see it.

    Raises:
        DiagnoseError: If it cannot be written.
    """
    data = {
        "schema": SCHEMA,
        "key": baseline.fingerprint.key,
        "fingerprint": {"hard": dict(baseline.fingerprint.hard), "soft": dict(baseline.fingerprint.soft)},
        "entries": [_entry_as_json(entry) for entry in baseline.entries],
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.parent.parent.name == FOLDER.parent.name:
            _show_to_git(path.parent.parent / ".gitignore")
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise DiagnoseError(f"baseline: cannot write {path}: {error.strerror}.") from error


def _show_to_git(ignores: Path) -> None:
    """Lets git see the baselines, beside whatever else the user lets it see."""
    lines = ignores.read_text(encoding="utf-8").splitlines() if ignores.is_file() else []
    missing = [line for line in GIT_IGNORES.splitlines() if line not in lines]
    if missing:
        ignores.write_text("\n".join([*lines, *missing]) + "\n", encoding="utf-8")


def file_for(place: Path, fingerprint: Fingerprint) -> Path:
    """Returns the baseline's file for a fingerprint: `place` itself, or in it where that is a folder.

    What is not there yet is a file if it is named like one. In a folder it is the one of that key; without
    one, one of an earlier version of ours that knew fewer facts.
    """
    if place.is_file() or (not place.is_dir() and place.suffix == ".json"):
        return place
    path = place / f"{fingerprint.key}.json"
    for other in () if path.exists() else sorted(place.glob("*.json")):
        with contextlib.suppress(DiagnoseError):
            known = load(other).fingerprint.hard
            if not differences(known, _known_to(known, fingerprint.hard)):
                return other
    return path


def _entry(data: Mapping[str, Any]) -> Entry:
    known = {metric.value for metric in Metric}

    def metrics(found: Mapping[str, float]) -> dict[Metric, float]:
        values = {Metric(name): float(value) for name, value in found.items() if name in known}
        if not all(value > 0 and math.isfinite(value) for value in values.values()):
            raise ValueError("a figure is not above 0")
        return values

    return Entry(
        when=str(data["when"]),
        commit=str(data["commit"]),
        branch=str(data["branch"]),
        metrics=metrics(data["metrics"]),
        runs=tuple(metrics(run) for run in data["runs"]),
        phase_ms=_phases(data.get("phase_ms", {})),
    )


def _phases(found: Mapping[str, float]) -> dict[Phase, float]:
    known = {phase.value for phase in Phase}
    times = {Phase(name): float(value) for name, value in found.items() if name in known}
    if not all(value >= 0 and math.isfinite(value) for value in times.values()):
        raise ValueError("a phase took less than no time")
    return times


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    def rounded(found: Mapping[Metric, float] | Mapping[Phase, float]) -> dict[str, float]:
        return {each.value: float(f"{value:.6g}") for each, value in found.items()}

    return {
        "when": entry.when,
        "commit": entry.commit,
        "branch": entry.branch,
        "metrics": rounded(entry.metrics),
        "runs": [rounded(run) for run in entry.runs],
        "phase_ms": rounded(entry.phase_ms),
    }
