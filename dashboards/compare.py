"""Two runs side by side."""

from __future__ import annotations

import hashlib
from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html
from diagnose.dashboards._analyst import Compared
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import RUN, Page, View, href

from diagnose.core.comparison import Outcome
from diagnose.core.errors import DiagnoseError
from diagnose.report import FaultChanges
from diagnose.report._charts import Waterfall
from diagnose.report._comparison import ONE_PAIR, changes_table, verdict
from diagnose.report._wording import printable
from diagnose.report.base import Paragraph
from diagnose.report.summary import sentence

MAX_OPTIONS = 100
"""More than anyone scrolls through; typing finds the others."""
TONES = {Outcome.FASTER: "good", Outcome.SLOWER: "alarm", Outcome.CANNOT_TELL: ""}


class Compare(Page):
    """Two runs: faster, slower or cannot tell, in all and phase by phase."""

    title = "Compare"
    order = 5
    of_run = False

    def layout(self, view: View, source: Source) -> Any:
        labels = {row.id: f"{row.id}  ({printable(row.script)})" for row in source.runs()}
        chosen = {side: _known(source, view.query.get(side, "")) for side in "ab"}
        for run in filter(None, chosen.values()):
            labels.setdefault(run, run)  # older than those that are listed, or not listed yet
        options = [{"label": label, "value": run} for run, label in labels.items()]
        return html.Div(
            [
                html.Div([html.P("Compare", className="eyebrow"), html.H1("Two runs")], className="title"),
                html.Div(
                    [
                        _chooser("a", "A, before", options, chosen["a"]),
                        _chooser("b", "B, after", options, chosen["b"]),
                        html.Div(id="compare-link"),
                    ],
                    className="toolbar",
                ),
                dcc.Store(id="compare-drawn"),
                html.Div(id="compare-body"),
            ]
        )

    def callbacks(self, app: Any, source: Source) -> None:
        @app.callback(  # type: ignore[untyped-decorator]
            Output("compare-link", "children"), Input("compare-a", "value"), Input("compare-b", "value")
        )
        def link(a: str | None, b: str | None) -> Any:
            if not a or not b:
                return html.Span("Choose two runs.", className="note")
            return dcc.Link("Compare", href=href("compare", a=a, b=b), className="button")

        @app.callback(  # type: ignore[untyped-decorator]
            Output("compare-body", "children"),
            Output("compare-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            State("compare-drawn", "data"),
        )
        def refresh(_: int, view: dict[str, Any] | None, drawn: str | None) -> Any:
            if not view or view.get("page") != "compare":
                return dash.no_update, dash.no_update
            query = view.get("query") or {}
            a, b = str(query.get("a", "")), str(query.get("b", ""))
            key, made = _made(source, a, b)
            stamp = hashlib.sha1(f"{a} {b} {key}".encode(), usedforsecurity=False).hexdigest()
            return (dash.no_update, dash.no_update) if stamp == drawn else (made(), stamp)


def _known(source: Source, run: str) -> str | None:
    try:
        return source.folder(run).name
    except DiagnoseError:
        return None


def _made(source: Source, a: str, b: str) -> tuple[str, Any]:
    """Returns what the body would depend on, and what makes it."""
    if not a or not b:
        words = "Choose an older and a newer run above, or pick them in the list of runs."
        return "none", lambda: empty("Two runs are compared here", words)
    try:
        compared = source.compared(a, b)
    except DiagnoseError as error:
        words = str(error)
        return words, lambda: empty("These runs cannot be compared", words)
    if compared is None:
        return "wait", lambda: empty("Comparing", "Both runs are read in full; this takes a few seconds.")
    done = compared
    return repr(done.comparison), lambda: _body(done, a, b)


def _chooser(side: str, label: str, options: list[dict[str, str]], value: str | None) -> Component:
    return dmc.Select(
        data=options,
        value=value,
        id=f"compare-{side}",
        label=label,
        searchable=True,
        limit=MAX_OPTIONS,
        placeholder="type to search",
        className="chooser",
    )


def _body(compared: Compared, a: str, b: str) -> list[Component]:
    comparison = compared.comparison
    before, after = compared.profiles
    names = [
        html.Span([f"{letter}: ", dcc.Link(run, href=href(RUN, run)), f" {count:,} steps measured"])
        for letter, run, count in zip("AB", (a, b), comparison.num_steps, strict=True)
    ]
    made = [
        html.Div(
            [
                html.P(sentence(verdict(comparison)), className="first"),
                html.P([names[0], html.Br(), names[1]], className="note"),
                *(html.P(printable(note)) for note in comparison.notes),
                html.P(ONE_PAIR, className="note"),
            ],
            className=f"verdict {TONES[comparison.headline.outcome]}".strip(),
            role="status",
        )
    ]
    if before.phase_time_ns and after.phase_time_ns:
        drawn = Waterfall(
            title="Mean step of A and of B, and the change of each phase; the table has the figures",
            before_ns=before.phase_time_ns,
            after_ns=after.phase_time_ns,
            names=("A", "B"),
        )
        note = "Mean time per step. Which of these changes are more than chance, the table says."
        made.append(panel("From A to B", chart(drawn, height=320), note=note))
    made.append(panel("Metric by metric, phase by phase", *shown([changes_table(comparison)])))
    faults = FaultChanges(before=before, after=after, prediction=compared.prediction)
    if faults.rows:
        made.append(panel("What became of the findings", *shown(faults.blocks())))
    else:
        nothing = Paragraph(text="Neither run has a finding.")
        made.append(panel("What became of the findings", *shown([nothing])))
    return made
