"""What the gate remembers: throughput over commits."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

from dash import html
from diagnose.dashboards._baselines import RATE, baselines_beside, machine_in_words, rated
from diagnose.dashboards._look_blocks import empty, panel, shown
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import Page, View

from diagnose.analysis.steps_in_history import level_changes
from diagnose.core.units import format_rate
from diagnose.gate.baseline import Baseline, Entry
from diagnose.report._charts import Levels
from diagnose.report._comparison import signed_share
from diagnose.report._wording import short_path
from diagnose.report.base import Block, Column, Paragraph, Row, Table

SHORT_HASH = 9
MAX_ROWS = 50


class GateHistory(Page):
    """Samples/s over commits, machine by machine, and where the level changed."""

    title = "Gate history"
    order = 60
    of_run = False

    def layout(self, view: View, source: Source) -> Any:
        head = html.Div([html.P("Gate", className="eyebrow"), html.H1("History")], className="title")
        known = baselines_beside(source.root)
        if not known:
            words = "The gate keeps what each commit was measured at, one file per kind of machine, under"
            place = short_path(str(source.root.parent / "baselines"))
            hint = f"{words} `{place}`. Nothing is there yet. On the main branch, record the first:"
            return html.Div([head, empty("No baselines yet", hint, "diagnose baseline update -- train.py")])
        return html.Div([head, *(_machine(key, baseline) for key, baseline in known.items())])


def _machine(key: str, baseline: Baseline | str) -> Any:
    if isinstance(baseline, str):
        return panel(key, *shown([Paragraph(text=baseline, alarm=True)]))
    hard = baseline.fingerprint.hard
    name, machine = str(hard.get("command") or key), f"{key}.json: {machine_in_words(hard)}"
    entries = rated(baseline)
    if not entries:
        words = Paragraph(text="No entry with samples/s.")
        return panel(name, *shown([words]), note=machine)
    rates = [entry.metrics[RATE] for entry in entries]
    changes = level_changes(rates)
    drawn = Levels(
        title="Samples per second of each commit; the table below has the figures",
        unit="samples/s",
        labels=[_name(entry) for entry in entries],
        values=rates,
        singles=[_singles(entry) for entry in entries],
        changes=changes,
    )
    blocks: list[Block] = [drawn, *_levels(entries, changes), _table(entries, changes)]
    return panel(name, *shown(blocks), note=machine)


def _levels(entries: tuple[Entry, ...], changes: list[int]) -> list[Paragraph]:
    """Says each change of level in words."""
    edges = [0, *changes, len(entries)]
    rates = [entry.metrics[RATE] for entry in entries]
    levels = [median(rates[one:other]) for one, other in pairwise(edges)]
    if not changes:
        return [Paragraph(text="No lasting change of level.")]
    return [
        Paragraph(
            text=f"From {_name(entries[at])} on, {format_rate(after)} samples/s, "
            f"{signed_share(after / before - 1)} against the {format_rate(before)} before.",
            alarm=after < before,
        )
        for at, (before, after) in zip(changes, pairwise(levels), strict=True)
    ]


def _table(entries: tuple[Entry, ...], changes: list[int]) -> Table:
    newest = list(enumerate(entries))[: -MAX_ROWS - 1 : -1]
    return Table(
        caption="Newest first.",
        columns=(
            Column(title="commit", code=True),
            Column(title="branch", code=True),
            Column(title="measured"),
            Column(title="runs", number=True),
            Column(title="samples/s", number=True),
            Column(title=""),
        ),
        rows=tuple(
            Row(
                cells=(
                    _name(entry),
                    entry.branch,
                    entry.when[:16].replace("T", " "),
                    f"{len(_singles(entry))}",
                    format_rate(entry.metrics[RATE]),
                    "new level" if index in changes else "",
                )
            )
            for index, entry in newest
        ),
    )


def _singles(entry: Entry) -> list[float]:
    return [run[RATE] for run in entry.runs if RATE in run]


def _name(entry: Entry) -> str:
    return entry.commit[:SHORT_HASH] or entry.when[:16]
