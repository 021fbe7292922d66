"""A baseline for people and for programs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diagnose.gate.baseline import Baseline
from diagnose.gate.by_history import DEVIATIONS, LEAST_ENTRIES
from diagnose.gate.judging import drop_of
from diagnose.gate.result import Metric
from diagnose.gate.words import amount, format_percent
from diagnose.report._wording import printable

SHOWN = (
    Metric.SAMPLES_PER_S,
    Metric.STEP_MS,
    Metric.CPU_MS,
    Metric.PEAK_MEMORY,
    Metric.PEAK_DEVICE_MEMORY,
    Metric.STARTUP,
)
WIDTH = 20


def baseline_text(path: Path, baseline: Baseline) -> str:
    """Returns the machine, each job, and what drop the scatter between jobs lets a gate find."""
    hard = baseline.fingerprint.hard
    lines = [f"{path}: {len(baseline.entries)} jobs", ""]
    lines += [f"  {name + ':':<20}{value}" for name, value in hard.items() if value not in ("", [], None)]
    shown = [metric for metric in SHOWN if any(metric in entry.metrics for entry in baseline.entries)]
    lines += [
        "",
        "  when                      commit    "
        + "".join(f"{m.label:<{WIDTH}.{WIDTH - 1}}" for m in shown),
    ]
    for entry in baseline.entries:
        cells = "".join(f"{_cell(entry.metrics, metric):<{WIDTH}}" for metric in shown)
        lines.append(f"  {entry.when:<26}{entry.commit[:8]:<10}{cells}".rstrip())
    lines += ["", *(f"  {_findable(baseline, metric)}" for metric in shown[:2])]
    return "\n".join(printable(line) for line in lines) + "\n"


def baselines_text(found: Sequence[tuple[Path, Baseline]]) -> str:
    """Returns one line for each baseline."""
    rows = [
        f"{path.stem:<14}{len(baseline.entries):>3} jobs  {baseline.fingerprint.hard.get('cpu', '?')}, "
        f"{baseline.fingerprint.hard.get('command', '?')}"
        for path, baseline in found
    ]
    return "\n".join(printable(row) for row in rows) + "\n"


def baseline_json(path: Path, baseline: Baseline) -> dict[str, Any]:
    """Returns the same for programs."""
    return {
        "path": str(path),
        "key": baseline.fingerprint.key,
        "jobs": len(baseline.entries),
        "fingerprint": {"hard": dict(baseline.fingerprint.hard), "soft": dict(baseline.fingerprint.soft)},
        "findable_drop": {
            metric.value: drop for metric in SHOWN if (drop := findable(baseline, metric)) is not None
        },
    }


def findable(baseline: Baseline, metric: Metric) -> float | None:
    """Returns the drop from which on a gate sees more than chance; `None` with too few jobs."""
    values = [entry.metrics[metric] for entry in baseline.entries if metric in entry.metrics]
    if len(values) < LEAST_ENTRIES:
        return None
    spread = statistics.stdev(math.log(value) for value in values)
    return drop_of(DEVIATIONS * spread * math.sqrt(1 + 1 / len(values)), metric)


def _findable(baseline: Baseline, metric: Metric) -> str:
    drop = findable(baseline, metric)
    if drop is None:
        return f"{metric.label}: {LEAST_ENTRIES} jobs are needed before a gate can judge by this"
    return f"{metric.label}: a drop of {format_percent(drop)} or more is beyond the scatter between jobs"


def _cell(metrics: Any, metric: Metric) -> str:
    return amount(metrics[metric], metric) if metric in metrics else "-"
