"""One run: how it goes, where its time goes, and why."""

from __future__ import annotations

from typing import Any

import dash
from dash import Input, Output, dcc, html
from dash import State as Known
from diagnose.dashboards._figure_run import cpus, device, ledger, legend, memory, throughput
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown
from diagnose.dashboards._look_control import control_of, control_panel, register
from diagnose.dashboards._look_findings import findings_panel
from diagnose.dashboards._look_kpis import kpis
from diagnose.dashboards._look_run import READING, marks, title, verdict_box
from diagnose.dashboards._look_zoom import Zoom, fields, links, zoom_of
from diagnose.dashboards._look_zoom import register as register_zoom
from diagnose.dashboards._snapshot import Snapshot, Steps
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import RUN, Page, View

from diagnose import report
from diagnose.core.errors import DiagnoseError
from diagnose.core.liveness import Liveness, State
from diagnose.core.plugins import discover
from diagnose.report._charts import PhaseAreas, StepLine
from diagnose.report._plotly import figure
from diagnose.report.base import Facts, Section

DETAILS = ("phases", "lines", "events", "notes", "abstentions", "about")
"""Sections of the report that stand below the charts."""
RANGE_WAITS_S, OVER_WAITS_S = 0.03, 30.0
"""For so long a range of steps is waited for; where the run is over no tick comes back for it."""

NOTHING = Snapshot(version=0, id="", liveness=Liveness(state=State.CANNOT_TELL))
"""What the charts show until the first figures are there."""
OUTPUTS = ("title", "verdict", "kpis", "windows", "legend", "details")


class Run(Page):
    """The verdict in words, the ledger over the steps, throughput, and the findings with their lines."""

    title = "Run"
    order = 10
    follows_query = True

    def layout(self, view: View, source: Source) -> Any:
        """See `Page`."""
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
                                    chart(memory(NOTHING), id="run-memory", height=130),
                                    chart(cpus(NOTHING), id="run-cpus", height=200),
                                    note="As the operating system sees them, once a second.",
                                ),
                            ],
                            className="grid",
                        ),
                        html.Div(
                            panel(
                                "Device",
                                chart(device(NOTHING), id="run-device", height=200),
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
                html.Div(id="run-details"),
            ]
        )

    def callbacks(self, app: Any, source: Source) -> None:
        """See `Page`."""
        register(app, source)
        register_zoom(app)

        @app.callback(  # type: ignore[untyped-decorator]
            *(Output(f"run-{name}", "children") for name in OUTPUTS),
            Output("run-ledger", "figure"),
            Output("run-throughput", "figure"),
            Output("run-memory", "figure"),
            Output("run-cpus", "figure"),
            Output("run-device", "figure"),
            Output("run-device-panel", "hidden"),
            Output("run-charts", "hidden"),
            Output("control", "hidden"),
            Output("control-action", "data"),
            Output("control-action", "placeholder"),
            Output("control-log", "children"),
            Output("run-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            Known("run-drawn", "data"),
        )
        def refresh(_: int, view: dict[str, Any] | None, drawn: dict[str, Any] | None) -> Any:
            same = (dash.no_update,) * (len(OUTPUTS) + 12)
            if not view or view.get("page") != RUN or not view.get("run"):
                return same
            query = view.get("query") or {}
            try:
                snap = source.run(view["run"]).snapshot()
                if not snap.version:
                    return same
                zoom = zoom_of(query)
                steps = _steps(source, snap, zoom)
                read = [steps.first, steps.width, int(steps.counts.sum())]
                version = {"version": snap.version, "run": snap.id, "query": query, "read": read}
                if drawn and {key: drawn.get(key) for key in version} == version:
                    return same
            except DiagnoseError as error:
                return _unreadable(error)
            analysed = (snap.analysed_steps, snap.over, len(snap.marks))
            details: Any = dash.no_update
            if not drawn or drawn.get("analysed") != list(analysed) or drawn.get("run") != snap.id:
                details = _details(snap, source)
            return (
                title(snap, "Run"),
                verdict_box(snap),
                shown([Facts(items=tuple(kpis(snap)), headline=True)]),
                links(snap, query),
                legend(steps, snap.device_share),
                details,
                _zoomed(figure(ledger(steps, marks(snap))), zoom),
                _zoomed(figure(throughput(steps, marks(snap))), zoom),
                figure(memory(snap)),
                figure(cpus(snap)),
                figure(device(snap)),
                snap.vitals.device is None,
                not snap.num_steps,
                *control_of(snap),
                {**version, "analysed": analysed},
            )


def _unreadable(error: DiagnoseError) -> tuple[Any, ...]:
    """Says why a run cannot be shown; what was shown of it is no longer true."""
    why = empty("This run cannot be shown", str(error))
    nothing = (None,) * (len(OUTPUTS) - 1)
    figures = (dash.no_update,) * 5  # hidden with all charts
    return (why, *nothing, *figures, True, True, True, [], "", [], None)


def _steps(source: Source, snap: Snapshot, zoom: Zoom) -> Steps:
    if zoom.between is None:
        return snap.recent if zoom.window == "newest" else snap.overview
    return source.steps(snap, *zoom.between, OVER_WAITS_S if snap.over else RANGE_WAITS_S)


def _zoomed(made: dict[str, Any], zoom: Zoom) -> dict[str, Any]:
    """Lets go of what was drawn with the mouse, once the figure shows it."""
    made["layout"]["uirevision"] = f"{zoom.window} {zoom.between}"
    return made


def _details(snap: Snapshot, source: Source) -> list[Component]:
    profile = snap.profile
    if profile is None:
        return []
    made = [findings_panel(profile, snap.id, source)]
    found = discover(report, Section)  # type: ignore[type-abstract]
    for name in DETAILS:
        section = found[name]
        # The charts of the whole run stand above, live.
        blocks = [
            block for block in section.blocks(profile) if not isinstance(block, PhaseAreas | StepLine)
        ]
        if blocks:
            made.append(panel(section.title, *shown(blocks)))
    return made
