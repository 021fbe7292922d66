"""The list of runs, as text and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_rate
from diagnose.report._json import SCHEMA, to_json
from diagnose.report._terminal import Terminal
from diagnose.report._text import block_lines
from diagnose.report._wording import outcome, started
from diagnose.report.base import Column, Row, Table

SUMMARY_KEYS = ("run", "status", "throughput", "steps", "overhead")

Runs = Sequence[tuple[str, Profile | str]]
"""Runs by name; instead of its profile, why one cannot be read."""


def runs_text(runs: Runs, total: int, terminal: Terminal) -> str:
    """Prints one line per run.

    Args:
        runs: The runs to print.
        total: How many there are.
        terminal: Where they are printed.
    """
    table = Table(
        caption=f"{len(runs)} of {total} runs, newest first" if len(runs) < total else "Newest first",
        columns=(
            Column(title="run", code=True),
            Column(title="started"),
            Column(title="script", code=True),
            Column(title="ended"),
            Column(title="steps", number=True),
            Column(title="median step", number=True),
            Column(title="samples/s", number=True),
        ),
        rows=tuple(Row(cells=_cells(name, profile)) for name, profile in runs),
    )
    return "".join(f"{line.rstrip()}\n" for line in block_lines(table, terminal))


def runs_json(runs: Runs) -> dict[str, Any]:
    """Returns the runs as JSON: of each what its report says under the keys of a summary."""
    entries = []
    for name, profile in runs:
        if isinstance(profile, str):
            entries.append({"name": name, "error": profile})
        else:
            report = to_json(profile)
            entries.append({"name": name, **{key: report[key] for key in SUMMARY_KEYS}})
    return {"schema": SCHEMA, "runs": entries}


def _cells(name: str, profile: Profile | str) -> tuple[str, ...]:
    if isinstance(profile, str):
        return (name, "", "", "unreadable", "", "", "")
    steps, rate = profile.steps, profile.throughput.samples_per_s
    return (
        name,
        started(profile.run)[:16],
        profile.run.script,
        outcome(profile.run),
        f"{steps.count:,}",
        "" if steps.median_ns is None else format_duration(steps.median_ns),
        "" if rate is None else format_rate(rate),
    )
