"""A comparison of two runs, as text and as JSON."""

from __future__ import annotations

from typing import Any

from diagnose.core.comparison import Change, Comparison, Outcome, Unit
from diagnose.core.phases import Phase
from diagnose.core.profile import RunInfo
from diagnose.core.units import NS_PER_MS, format_duration, format_part, format_rate, format_share
from diagnose.report._fault_changes import FaultChanges, prediction_json
from diagnose.report._json import SCHEMA, finite, run_as_json
from diagnose.report._terminal import Terminal
from diagnose.report._text import block_lines
from diagnose.report.base import Column, Paragraph, Row, Table

LABELS = {"samples_per_s": "samples/s", "step_time": "step time, median"}
NS_PER_UNIT = {Unit.NS: NS_PER_MS, Unit.PER_S: 1}
JSON_UNIT = {Unit.NS: "ms", Unit.PER_S: "per_s"}
ONE_PAIR = (
    "One run of each cannot separate a change of the code from a change of the machine between the runs. "
    "To be sure, run both again in turn (A B B A), and see whether the order of the results stays."
)


def comparison_text(
    comparison: Comparison,
    runs: tuple[RunInfo, RunInfo],
    terminal: Terminal,
    faults: FaultChanges | None = None,
) -> str:
    """Prints a comparison.

    Args:
        comparison: What was found.
        runs: The run that was before, and the one after.
        terminal: Where it is printed.
        faults: What became of the first run's findings, where the rules were asked.

    Returns:
        The lines, each with its newline.
    """
    lines = [
        terminal.clean(f"{name} {run.id}, {run.script}, {count:,} steps")
        for name, run, count in zip(("A, before:", "B, after: "), runs, comparison.num_steps, strict=True)
    ]
    slower = comparison.headline.outcome is Outcome.SLOWER
    lines += ["", *block_lines(Paragraph(text=verdict(comparison), alarm=slower), terminal), ""]
    lines += block_lines(changes_table(comparison), terminal)
    if faults is not None and faults.rows:
        lines += ["", *(line for block in faults.blocks() for line in block_lines(block, terminal))]
    for text in (*comparison.notes, ONE_PAIR):
        lines += ["", *block_lines(Paragraph(text=text), terminal)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def comparison_json(
    comparison: Comparison, runs: tuple[RunInfo, RunInfo], faults: FaultChanges | None = None
) -> dict[str, Any]:
    """Returns a comparison as the JSON object of schema 1.

    Times are milliseconds. `outcome` is `faster`, `slower` or `cannot_tell`; `noise` is the smallest
    difference between `before` and `after` that counts, `null` where nothing could be judged.
    `prediction` is what the findings that are gone had promised, beside what was measured.
    """
    report = {
        "schema": SCHEMA,
        "before": run_as_json(runs[0]),
        "after": run_as_json(runs[1]),
        "num_steps": comparison.num_steps,
        "outcome": comparison.headline.outcome.value,
        "judged_by": comparison.headline.name,
        "metrics": [_change_json(change) for change in comparison.metrics],
        "phases": [_change_json(change) for change in comparison.phases],
        "findings": [] if faults is None else faults.as_json(),
        "prediction": None if faults is None else prediction_json(faults.prediction),
        "runs_per_side": 1,
        "notes": [*comparison.notes, ONE_PAIR],
    }
    return {key: finite(value) for key, value in report.items()}


def verdict(comparison: Comparison) -> str:
    """Says in one sentence what the comparison ends in."""
    change = comparison.headline
    if change.noise is None:
        return f"cannot tell: {change.reason}"
    values = f"{_value(change.before, change)} -> {_value(change.after, change)} {_of_what(change)}"
    return (
        f"{change.outcome.label}: {values}, {signed_share(change.change_share)}; "
        f"two single runs must differ by {_limit(change)} to be told apart"
    )


def signed_share(share: float | None) -> str:
    """Returns `+4.1 %`, `-52 %`; nothing where there is no share."""
    if share is None:
        return ""
    text = format_share(abs(share))
    return text if text == "0 %" else f"{'-' if share < 0 else '+'}{text}"


def changes_table(comparison: Comparison) -> Table:
    """Returns every metric and phase of two runs, each with its outcome."""
    columns = (
        Column(title="per step"),
        Column(title="A", number=True),
        Column(title="B", number=True),
        Column(title="change", number=True),
        Column(title="needed", number=True),
        Column(title="outcome"),
    )
    changes = (*comparison.metrics, *comparison.phases)
    shown = [change for change in changes if change.before or change.after]
    step_ns = max(
        (change.before or 0.0 for change in comparison.metrics if change.unit is Unit.NS), default=0.0
    )
    return Table(
        caption="Phases are mean times per step. 'needed' is the change beyond which two single runs "
        "differ by more than chance.",
        columns=columns,
        rows=tuple(_row(change, step_ns) for change in shown),
    )


def _row(change: Change, step_ns: float) -> Row:
    outcome = change.outcome.label + (f" ({change.reason})" if change.reason else "")
    return Row(
        cells=(
            LABELS.get(change.name) or Phase(change.name).label,
            _value(change.before, change, step_ns),
            _value(change.after, change, step_ns),
            signed_share(change.change_share),
            _limit(change),
            outcome,
        )
    )


def _limit(change: Change) -> str:
    """Returns the noise as a share of what was before; as a time where there was nothing before."""
    if change.noise is None:
        return ""
    if change.noise_share is None or change.noise_share > 9.99:
        return _value(change.noise, change)
    return format_share(change.noise_share)


def _value(value: float | None, change: Change, step_ns: float = 0.0) -> str:
    if value is None:
        return "-"
    if change.unit is Unit.PER_S:
        return format_rate(value)
    return format_part(value, step_ns) if step_ns else format_duration(value)


def _of_what(change: Change) -> str:
    return "samples/s" if change.unit is Unit.PER_S else "per step (median)"


def _change_json(change: Change) -> dict[str, Any]:
    scale = NS_PER_UNIT[change.unit]

    def scaled(value: float | None) -> float | None:
        return None if value is None else value / scale

    return {
        "name": change.name,
        "unit": JSON_UNIT[change.unit],
        "before": scaled(change.before),
        "after": scaled(change.after),
        "change": change.change_share,
        "noise": scaled(change.noise),
        "outcome": change.outcome.value,
        "reason": change.reason,
    }
