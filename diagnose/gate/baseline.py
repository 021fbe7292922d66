"""What earlier jobs measured on machines like this one, in a small file that is reviewed like code."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diagnose.core.errors import DiagnoseError
from diagnose.gate.fingerprint import Fingerprint, differences
from diagnose.gate.pairs import drop_of, log_of
from diagnose.gate.result import Judgement, MeasuredRun, Metric, Verdict
from diagnose.gate.statistics import Z_95, Z_975
from diagnose.gate.words import format_percent

SCHEMA = 1

FOLDER = Path(".diagnose") / "baselines"

GIT_IGNORES = "*\n!/.gitignore\n!/baselines/\n!/baselines/*.json\n"
"""Of everything under `.diagnose`, git is to see the baselines alone."""

MOST_ENTRIES = 30

LEAST_ENTRIES = 10
"""Jobs below which their scatter is not known."""

RUNS = 3
"""Runs in a job; their median is what the job measured."""

DEVIATIONS = 3.5
"""Standard deviations between jobs that are within chance.

Of the ordinary standard deviation: the one from the median absolute deviation is too small too often with
ten jobs (1.4 % false alarms instead of 0.5 %, `benchmarks/gate_simulation.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one job measured.

    Attributes:
        when: ISO 8601 with time zone.
        metrics: Median over the job's runs.
        runs: The same of each run.
    """

    when: str
    commit: str
    branch: str
    metrics: Mapping[Metric, float]
    runs: tuple[Mapping[Metric, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The last jobs on one kind of machine, oldest first."""

    fingerprint: Fingerprint
    entries: tuple[Entry, ...] = ()

    def with_entry(self, entry: Entry) -> Baseline:
        """Returns this with one more job, without those that are too old."""
        return replace(self, entries=(*self.entries, entry)[-MOST_ENTRIES:])


def entry_of(runs: Sequence[MeasuredRun], *, when: str, commit: str, branch: str) -> Entry:
    """Returns what a job's runs come to: each metric that all of them have."""
    common = [metric for metric in Metric if all(metric in run.figures for run in runs)]
    return Entry(
        when=when,
        commit=commit,
        branch=branch,
        metrics={metric: statistics.median(run.figures[metric] for run in runs) for metric in common},
        runs=tuple({metric: run.figures[metric] for metric in common} for run in runs),
    )


def judge_by_history(
    baseline: Baseline, runs: Sequence[MeasuredRun], metric: Metric, max_drop: float
) -> Judgement | None:
    """Judges a job by earlier ones.

    It passes, or loses, only where the scatter between jobs allows to say so: a drop that is larger than
    allowed and smaller than what the machine does by itself is neither.

    Returns:
        `None` where no run, or no earlier job, has the metric.
    """
    earlier = [entry.metrics[metric] for entry in baseline.entries if metric in entry.metrics]
    figures = [run.figures[metric] for run in runs if metric in run.figures]
    if not earlier or not figures:
        return None
    sign = -1.0 if metric.more_is_better else 1.0
    logs = [sign * math.log(value) for value in earlier]
    estimate = sign * math.log(statistics.median(figures)) - statistics.median(logs)
    limit = log_of(max_drop, metric)
    count = len(logs)
    error = statistics.stdev(logs) * math.sqrt(1 + 1 / count) if count > 1 else math.nan
    threshold = max(limit, DEVIATIONS * error) if count > 1 else math.nan
    verdict, reason = Verdict.PASS, ""
    if count < LEAST_ENTRIES:
        verdict = Verdict.INCONCLUSIVE
        jobs = f"{count} job{'s' if count > 1 else ''}"
        reason = f"the baseline holds {jobs}; {LEAST_ENTRIES} are needed to know their scatter"
    elif len(figures) < RUNS:
        verdict = Verdict.INCONCLUSIVE
        reason = f"{len(figures)} of {RUNS} runs could be measured"
    elif estimate > threshold:
        verdict = Verdict.REGRESSION
    elif estimate > limit:
        verdict = Verdict.INCONCLUSIVE
        found = drop_of(threshold, metric)
        reason = (
            "jobs on this kind of machine differ too much: only a drop of "
            f"{format_percent(found)} is beyond chance"
        )
    return Judgement(
        metric=metric,
        verdict=verdict,
        max_drop=max_drop,
        drop=drop_of(estimate, metric),
        low=drop_of(estimate - Z_975 * error, metric),
        high=drop_of(estimate + Z_975 * error, metric),
        error=error,
        detectable=drop_of(threshold + Z_95 * error, metric),
        p=math.nan,
        pairs=count,
        base=statistics.median(earlier),
        head=statistics.median(figures),
        reason=reason,
    )


def mismatch(baseline: Baseline, now: Fingerprint) -> tuple[str, ...]:
    """Says in which hard facts this machine, or the work of a step, differs from the baseline's."""
    return differences(baseline.fingerprint.hard, now.hard)


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
            (path.parent.parent / ".gitignore").write_text(GIT_IGNORES, encoding="utf-8")
        beside.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise DiagnoseError(f"baseline: cannot write {path}: {error.strerror}.") from error


def file_for(place: Path, fingerprint: Fingerprint) -> Path:
    """Returns the baseline's file for a fingerprint: `place` itself, or in it where that is a folder."""
    return place / f"{fingerprint.key}.json" if place.is_dir() or place.suffix != ".json" else place


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
    )


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    def metrics(found: Mapping[Metric, float]) -> dict[str, float]:
        return {metric.value: float(f"{value:.6g}") for metric, value in found.items()}

    return {
        "when": entry.when,
        "commit": entry.commit,
        "branch": entry.branch,
        "metrics": metrics(entry.metrics),
        "runs": [metrics(run) for run in entry.runs],
    }
