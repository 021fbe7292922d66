"""One run: how it goes, where its time goes, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dash
import numpy as np
from dash import Input, Output, State, dcc, html
from diagnose.dashboards._look_blocks import Component, chart, empty, panel, shown, swatch, tabs
from diagnose.dashboards._look_control import control_of, control_panel, register
from diagnose.dashboards._look_findings import findings_panel
from diagnose.dashboards._look_run import marks, run_of, title, verdict_box
from diagnose.dashboards._snapshot import Snapshot, Steps
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import RUN, Page, View, href

from diagnose import report
from diagnose.core.errors import DiagnoseError
from diagnose.core.plugins import discover
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_MS, format_bytes, format_duration, format_rate, format_share
from diagnose.report._charts import PhaseAreas, StepLine, TimeLines
from diagnose.report._plotly import figure
from diagnose.report._tuning_words import gain
from diagnose.report.base import Fact, Facts, Section
from diagnose.report.summary import cost, figures

MIB = 2**20
NOW_STEPS = 100
"""Newest steps that `now` is the mean of: enough to be calm, few enough to follow a change."""
SMALLEST_SHARE = 0.0005
"""What would be called 0.0 % is not seen in the chart either."""
DETAILS = ("phases", "lines", "events", "notes", "abstentions", "about")
"""Sections of the report that stand below the charts."""
BEFORE_TUNING = ("samples/s", "tokens/s", "steps/s", "step time, median")
WINDOWS = {"all": "All steps", "newest": "Newest steps"}

OUTPUTS = ("title", "verdict", "kpis", "legend", "details", "host")


class Run(Page):
    """The verdict in words, the ledger over the steps, throughput, and the findings with their lines."""

    title = "Run"
    order = 10

    def layout(self, view: View, source: Source) -> Any:
        """See `Page`."""
        run = run_of(view)
        chosen = _window(view.query)
        windows = {words: href(RUN, run, window=name) for name, words in WINDOWS.items()}
        return html.Div(
            [
                dcc.Store(id="run-drawn"),
                html.Div(id="run-title"),
                html.Div(id="run-verdict"),
                html.Div(id="run-kpis"),
                html.Div(
                    [
                        panel(
                            "Where each step goes",
                            tabs(windows, WINDOWS[chosen], "Which steps"),
                            html.Div(id="run-legend"),
                            chart(_ledger(None, ()), id="run-ledger", height=300),
                            note="Stacked to the whole step. Drag to zoom, double click to see all.",
                        ),
                        html.Div(
                            [
                                panel(
                                    "Throughput",
                                    chart(_throughput(None, ()), id="run-throughput", height=330),
                                    note="What tuning or you did is marked where it happened.",
                                ),
                                panel(
                                    "Memory and CPUs",
                                    html.Div(id="run-host"),
                                    note="Of the training process.",
                                ),
                            ],
                            className="grid",
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

        @app.callback(  # type: ignore[untyped-decorator]
            *(Output(f"run-{name}", "children") for name in OUTPUTS),
            Output("run-ledger", "figure"),
            Output("run-throughput", "figure"),
            Output("run-charts", "hidden"),
            Output("control", "hidden"),
            Output("control-action", "data"),
            Output("control-log", "children"),
            Output("run-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            State("run-drawn", "data"),
        )
        def refresh(_: int, view: dict[str, Any] | None, drawn: dict[str, Any] | None) -> Any:
            same = (dash.no_update,) * (len(OUTPUTS) + 7)
            if not view or view.get("page") != RUN or not view.get("run"):
                return same
            query = view.get("query") or {}
            try:
                live = source.run(view["run"])
                snap = live.snapshot()
                version = {"version": snap.version, "run": snap.id, "query": query}
                if drawn and {key: drawn.get(key) for key in version} == version:
                    return same
                between = _range(query)
                steps = live.steps(*between) if between else _steps(snap, _window(query))
            except DiagnoseError as error:
                return (empty("This run cannot be shown", str(error)), *same[1:])
            analysed = (snap.analysed_steps, snap.over, len(snap.marks))
            details: Any = dash.no_update
            if not drawn or drawn.get("analysed") != list(analysed) or drawn.get("run") != snap.id:
                details = _details(snap, source)
            return (
                title(snap, "Run"),
                verdict_box(snap),
                shown([Facts(items=tuple(_kpis(snap)), headline=True)]),
                _legend(steps),
                details,
                _host(snap),
                figure(_ledger(steps, marks(snap))),
                figure(_throughput(steps, marks(snap))),
                not snap.num_steps,
                *control_of(snap),
                {**version, "analysed": analysed},
            )


def _window(query: Any) -> str:
    chosen = str(query.get("window", "all"))
    return chosen if chosen in WINDOWS else "all"


def _range(query: Any) -> tuple[int, int] | None:
    """Returns the steps that the address asks for, first and last (exclusive), if it asks for any."""
    first, last = str(query.get("from", "")), str(query.get("to", ""))
    if not (first.isascii() and first.isdigit() and last.isascii() and last.isdigit()):
        return None
    begin, end = int(first[:12]), int(last[:12])
    return (begin, end) if begin < end else None


def _steps(snap: Snapshot, window: str) -> Steps:
    return snap.recent if window == "newest" else snap.overview


def _ledger(steps: Steps | None, marked: Any) -> PhaseAreas:
    return PhaseAreas(
        title="Time per step of each phase, stacked, over the steps; the ledger below has the figures",
        first=steps.first if steps is not None else 0,
        width=steps.width if steps is not None else 1,
        phase_ms=steps.phase_ms if steps is not None else {},
        marks=_within(steps, marked),
    )


def _throughput(steps: Steps | None, marked: Any) -> StepLine:
    known = steps is not None and bool(np.nansum(steps.samples_per_s))
    values = np.zeros(0)
    if steps is not None:
        values = steps.samples_per_s if known else _steps_per_s(steps)
    return StepLine(
        title="Throughput over the steps, with what tuning did marked",
        unit="steps/s" if steps is not None and not known else "samples/s",
        first=steps.first if steps is not None else 0,
        width=steps.width if steps is not None else 1,
        values=values,
        marks=_within(steps, marked),
    )


def _steps_per_s(steps: Steps) -> Any:
    with np.errstate(divide="ignore"):
        return 1000.0 / steps.step_ms


def _within(steps: Steps | None, marked: Any) -> Any:
    if steps is None:
        return ()
    end = steps.first + steps.width * len(steps.step_ms)
    return tuple(mark for mark in marked if steps.first <= mark.step <= end)


def _legend(steps: Steps) -> Component:
    whole = float(np.nansum(steps.step_ms * steps.counts))
    items = []
    for phase, times in steps.phase_ms.items():
        part = float(np.nansum(times * steps.counts)) / whole if whole else 0.0
        if part < SMALLEST_SHARE:
            continue
        items.append(html.Li([swatch(phase), f"{phase.label} {format_share(part)}"]))
    return html.Ul(items, className="legend", **{"aria-label": "Phases and their share of these steps"})


def _kpis(snap: Snapshot) -> list[Fact]:
    facts = []
    if not snap.over and len(snap.recent.step_ms):
        newest = snap.recent.step_ms[-NOW_STEPS:]
        rate = float(np.mean(snap.recent.samples_per_s[-NOW_STEPS:]))
        mean_ns = float(np.mean(newest)) * NS_PER_MS
        value = f"{format_rate(rate)} samples/s" if rate else format_duration(mean_ns)
        facts.append(Fact(label="now", value=value, detail=f"mean of the newest {len(newest)} steps"))
    if snap.profile is not None:
        facts += _measured(snap.profile)
    resident = snap.vitals.resident_bytes
    if np.isfinite(resident).any():
        now = float(resident[np.isfinite(resident)][-1])
        peak = f"at most {format_bytes(float(np.nanmax(resident)))}"
        facts.append(Fact(label="memory", value=format_bytes(now), detail=peak))
    return facts


def _measured(profile: Profile) -> list[Fact]:
    """Returns the report's figures; of a tuned run they are those before it was tuned, and say so."""
    facts = [*figures(profile), *cost(profile)]
    tuning = profile.tuning
    if tuning is None or not tuning.kept:
        return facts
    before = [
        replace(fact, detail=", ".join(filter(None, (fact.detail, "before tuning"))))
        if fact.label in BEFORE_TUNING
        else fact
        for fact in facts
    ]
    if tuning.confirmation is None:
        return before
    speedup, _, interval = gain(tuning.confirmation).partition(" (")
    won = Fact(label="tuned to", value=speedup, detail=f"{interval.rstrip(')')}; confirmed on against off")
    return [won, *before]


def _host(snap: Snapshot) -> Component:
    vitals = snap.vitals
    if np.isfinite(vitals.process_cpus).sum() < 2:
        return empty(
            "Not enough readings yet", "The process is asked once a second; a longer run shows more."
        )
    memory = TimeLines(
        title="Memory of the training process over time",
        unit="MiB",
        seconds=vitals.time_s,
        lines={"resident": vitals.resident_bytes / MIB},
    )
    cpus = TimeLines(
        title="CPUs in use over time: by training, by its workers, by all programs together",
        unit="CPUs",
        seconds=vitals.time_s,
        lines={
            "training process": vitals.process_cpus,
            "its workers": vitals.child_cpus,
            "all programs": vitals.busy_cpus,
        },
    )
    return html.Div([chart(memory, height=130, id="run-memory"), chart(cpus, height=200, id="run-cpus")])


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
