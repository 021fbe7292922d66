"""One run: how it goes, where its time goes, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dash
from dash import Input, Output, dcc, html
from dash import State as Known
from diagnose.dashboards._figure_run import READ, lane, ledger, legend, throughput
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown
from diagnose.dashboards._look_control import control_of, control_panel, register
from diagnose.dashboards._look_findings import findings
from diagnose.dashboards._look_kpis import kpis
from diagnose.dashboards._look_run import READING, title, verdict_box
from diagnose.dashboards._look_zoom import Zoom, fields, links, zoom_of
from diagnose.dashboards._look_zoom import register as register_zoom
from diagnose.dashboards._parcel import Parcel, Part
from diagnose.dashboards._snapshot import Snapshot, Steps
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import RUN, Page, View

from diagnose import report
from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import Liveness, State
from diagnose.core.plugins import discover
from diagnose.report._charts import Chart, PhaseAreas, StepLine
from diagnose.report._plotly import figure
from diagnose.report.base import Facts, Section

DETAILS = ("phases", "lines", "events", "notes", "abstentions", "about")
"""Sections of the report that stand below the charts."""
RANGE_WAITS_S = 0.03
"""For so long a range of steps is waited for; until it has been read, the bins of all steps are shown."""

NOTHING = Snapshot(version=0, id="", liveness=Liveness(state=State.CANNOT_TELL))
"""What the charts show until the first figures are there."""
WORDS = ("title", "verdict", "kpis", "windows", "legend")
MAIN = ("ledger", "throughput")
"""The figures that show whether the run goes on as it should."""
FIGURES = (*MAIN, *READ)
PARTS = ("findings", "details")
"""What is long, and changes seldom: of these only what changed is sent."""


class Run(Page):
    """The verdict in words, the ledger over the steps, throughput, and the findings with their lines."""

    title = "Run"
    order = 10
    follows_query = True

    def layout(self, view: View, source: Source) -> Any:
        return html.Div(
            [
                dcc.Store(id="run-drawn"),
                html.Div(READING, id="run-title"),
                html.Div(id="run-verdict"),
                html.Div(id="run-kpis"),
                html.Div(
                    [
                        panel(
                            "Where each step goes",
                            fields(),
                            html.Div(id="run-legend"),
                            chart(ledger(Steps(), ()), id="run-ledger", height=300),
                            note="Stacked to the whole step. Drag to zoom, double click to see all.",
                        ),
                        html.Div(
                            [
                                panel(
                                    "Throughput",
                                    chart(throughput(Steps(), ()), id="run-throughput", height=330),
                                    note="What tuning or you did is marked where it happened.",
                                ),
                                panel(
                                    "Memory and CPUs",
                                    chart(lane("memory", NOTHING), id="run-memory", height=130),
                                    chart(lane("cpus", NOTHING), id="run-cpus", height=200),
                                    note="As the operating system sees them, once a second.",
                                ),
                            ],
                            className="grid",
                        ),
                        html.Div(
                            panel(
                                "Device",
                                chart(lane("device", NOTHING), id="run-device", height=200),
                                note="As its driver sees it, once a second. Kernels of anybody count.",
                            ),
                            id="run-device-panel",
                            hidden=True,
                        ),
                    ],
                    id="run-charts",
                    hidden=True,
                ),
                control_panel(),
                html.Div(
                    panel("What slows it down", html.Div([], id="run-findings")),
                    id="run-findings-panel",
                    hidden=True,
                ),
                html.Div([], id="run-details"),
            ]
        )

    def callbacks(self, app: Any, source: Source) -> None:
        register(app, source)
        register_zoom(app)

        @app.callback(  # type: ignore[untyped-decorator]
            *(Output(f"run-{name}", "children") for name in WORDS),
            Output("run-device-panel", "hidden"),
            Output("run-charts", "hidden"),
            Output("control", "hidden"),
            Output("control-action", "data"),
            Output("control-action", "placeholder"),
            Output("control-log", "children"),
            Output("run-findings-panel", "hidden"),
            *(Output(f"run-{name}", "figure") for name in FIGURES),
            *(Output(f"run-{name}", "children") for name in PARTS),
            Output("run-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            Known("run-drawn", "data"),
        )
        def refresh(_: int, view: dict[str, Any] | None, drawn: dict[str, Any] | None) -> Any:
            same = (dash.no_update,) * (len(WORDS) + 7 + len(FIGURES) + len(PARTS) + 1)
            if not view or view.get("page") != RUN or not view.get("run"):
                return same
            query = view.get("query") or {}
            try:
                snap = source.run(view["run"]).snapshot()
                if not snap.version:
                    return same
                zoom = zoom_of(query)
                steps = _steps(source, snap, zoom)
            except DiagnoseError as error:
                return _unreadable(error)
            read = [steps.first, steps.width, int(steps.counts.sum())]
            seen = {"version": snap.version, "run": snap.id, "query": query, "read": read}
            drawn = drawn if drawn and drawn.get("run") == snap.id else {}
            if not drawn.get("more") and seen == {key: drawn.get(key) for key in seen}:
                return same
            words = _words(snap, query, steps)
            parcel = Parcel(snap.version, drawn.get("sent", {}) if drawn else None)
            parcel.must_hold(words)
            figures = {
                "ledger": _zoomed(ledger(steps, snap.marks), zoom),
                "throughput": _zoomed(throughput(steps, snap.marks), zoom),
                **{name: figure(lane(name, snap)) for name in READ},
            }
            analysed = [snap.analysed_steps, snap.over, len(snap.marks)]
            parts = [Part(name, drawn.get(name, [])) for name in PARTS]
            if drawn.get("analysed") != analysed or drawn.get("owed"):
                for part, made in zip(parts, _details(snap, source), strict=True):
                    part.becomes(made)
            before = {drawn.get("sent", {}).get(name) for name in MAIN}
            waited = before != {drawn.get("version")}  # long findings do not stop them for two ticks
            parcel.fill(figures, parts, MAIN if waited or drawn.get("query") != query else ())
            if parcel.is_full:
                source.expect(snap.id)
            grown = [part.answer(parcel.taken) for part in parts]
            return (
                *words,
                *(figures[name] if name in parcel.taken else dash.no_update for name in FIGURES),
                *grown,
                {
                    **seen,
                    "analysed": analysed,
                    "sent": parcel.sent,
                    "more": parcel.is_full,
                    "owed": any(part.is_short for part in parts),
                    **{part.name: part.stamps for part in parts},
                },
            )


def _unreadable(error: DiagnoseError) -> tuple[Any, ...]:
    """Says why a run cannot be shown; what was shown of it is no longer true."""
    why = empty("This run cannot be shown", str(error))
    nothing = (None,) * (len(WORDS) - 1)
    figures = (dash.no_update,) * len(FIGURES)  # hidden with all charts
    return (why, *nothing, True, True, True, [], "", [], True, *figures, *([] for _ in PARTS), None)


def _steps(source: Source, snap: Snapshot, zoom: Zoom) -> Steps:
    if zoom.between is None:
        return snap.recent if zoom.window == "newest" else snap.overview
    return source.steps(snap, *zoom.between, RANGE_WAITS_S)


def _words(snap: Snapshot, query: Mapping[str, str], steps: Steps) -> tuple[Any, ...]:
    """Returns what no tick goes without, in the order of the outputs."""
    return (
        title(snap, "Run"),
        verdict_box(snap),
        shown([Facts(items=tuple(kpis(snap)), headline=True)]),
        links(snap, query),
        legend(steps, snap.device_share),
        snap.vitals.device is None,
        not snap.num_steps,
        *control_of(snap),
        snap.profile is None,
    )


def _zoomed(drawn: Chart, zoom: Zoom) -> dict[str, Any]:
    """Draws a chart, and lets go of what was drawn with the mouse: the figure shows it."""
    made = figure(drawn)
    made["layout"]["uirevision"] = f"{zoom.window} {zoom.between}"
    return made


def _details(snap: Snapshot, source: Source) -> tuple[list[Component], list[Component]]:
    """Returns the findings, and what stands below them."""
    profile = snap.profile
    if profile is None:
        return [], []
    made = []
    found = discover(report, Section)  # type: ignore[type-abstract]
    for name in DETAILS:
        section = found[name]
        # The charts of the whole run stand above, live.
        blocks = [
            block for block in section.blocks(profile) if not isinstance(block, PhaseAreas | StepLine)
        ]
        if blocks:
            made.append(panel(section.title, *shown(blocks)))
    return findings(profile, snap.id, source), made
