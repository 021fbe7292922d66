"""All recorded runs."""

from __future__ import annotations

from typing import Any

import dash
import dash_mantine_components as dmc
from dash import Input, Output, State, dcc, html
from diagnose.dashboards._look_blocks import Component, empty, tabs
from diagnose.dashboards._source import RunRow, Source
from diagnose.dashboards.base import RUN, Page, View, href

from diagnose.core.liveness import State as Alive
from diagnose.core.units import NS_PER_MS, format_duration, format_rate
from diagnose.report._wording import printable, short_path

MAX_ROWS = 200
"""More rows than anyone reads; the search finds the others."""
STATES = {
    "": "All",
    "running": "Running",
    "ended": "Ended",
    "tuned": "Tuned",
    "failed": "Not closed or failed",
}
COLUMNS = ("", "run", "how it stands", "steps", "step", "samples/s", "what slows it down")
NUMBERS = ("steps", "step", "samples/s")


class Runs(Page):
    """Every recorded run, newest first: search, filter, and pick two to compare."""

    title = "Runs"
    order = 0
    of_run = False

    def layout(self, view: View, source: Source) -> Any:
        """See `Page`."""
        chosen = view.query.get("state", "")
        states = {words: href(**({"state": state} if state else {})) for state, words in STATES.items()}
        return html.Div(
            [
                html.Div([html.H1("Runs"), html.P(id="runs-count", className="under")], className="title"),
                html.Div(
                    [
                        html.Div(
                            [
                                html.Label("Search", htmlFor="runs-search", className="detail"),
                                dcc.Input(
                                    id="runs-search",
                                    type="search",
                                    value=view.query.get("search", ""),
                                    placeholder="name, script, finding",
                                    debounce=False,
                                    className="field",
                                ),
                            ],
                            className="labelled",
                        ),
                        tabs(states, STATES.get(chosen, ""), "Which runs"),
                        html.Div(id="runs-compare", role="status"),
                    ],
                    className="toolbar",
                ),
                dcc.Store(id="runs-drawn"),
                html.Div(id="runs-table"),
            ]
        )

    def callbacks(self, app: Any, source: Source) -> None:
        """See `Page`."""

        @app.callback(  # type: ignore[untyped-decorator]
            Output("runs-table", "children"),
            Output("runs-count", "children"),
            Output("runs-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            Input("runs-search", "value"),
            State("runs-drawn", "data"),
            State({"kind": "runs-pick", "run": dash.ALL}, "checked"),
            State({"kind": "runs-pick", "run": dash.ALL}, "id"),
        )
        def refresh(
            _: int,
            view: dict[str, Any] | None,
            search: str | None,
            drawn: str | None,
            picked: list[bool],
            boxes: list[dict[str, str]],
        ) -> Any:
            if not view or view.get("page") != "runs":
                return dash.no_update, dash.no_update, dash.no_update
            every = source.runs()
            if not every:
                return _none(source), "", ""
            rows = filtered(every, str((view.get("query") or {}).get("state", "")), search or "")
            key = repr((rows, len(every)))
            if key == drawn:
                return dash.no_update, dash.no_update, dash.no_update
            chosen = set(_picked(picked, boxes))
            shown = f"{len(rows):,} of {len(every):,}" if len(rows) < len(every) else f"{len(every):,}"
            count = f"{shown} under {short_path(str(source.root))}, newest first"
            if not rows:
                return empty("No run matches", "Clear the search, or choose another filter."), count, key
            return _table(rows[:MAX_ROWS], chosen), count, key

        @app.callback(  # type: ignore[untyped-decorator]
            Output("runs-compare", "children"),
            Input({"kind": "runs-pick", "run": dash.ALL}, "checked"),
            State({"kind": "runs-pick", "run": dash.ALL}, "id"),
        )
        def pick(picked: list[bool], boxes: list[dict[str, str]]) -> Any:
            runs = _picked(picked, boxes)
            if len(runs) < 2:
                return html.Span(
                    "Pick two runs to compare them." if not runs else "Pick one more.", className="note"
                )
            # The table is newest first; the older of two is what the newer is compared with.
            return dcc.Link(
                "Compare the two", href=href("compare", a=runs[-1], b=runs[0]), className="button"
            )


def _picked(picked: list[bool], boxes: list[dict[str, str]]) -> list[str]:
    return [box["run"] for box, is_picked in zip(boxes, picked, strict=True) if is_picked]


def filtered(rows: tuple[RunRow, ...], state: str, search: str) -> list[RunRow]:
    """Returns the rows that stand as `state` says, and in which each word of the search is found."""
    words = search.lower().split()
    return [
        row
        for row in rows
        if _is(row, state)
        and all(
            word in f"{row.id} {row.script} {' '.join(row.argv)} {row.verdict}".lower() for word in words
        )
    ]


def _is(row: RunRow, state: str) -> bool:
    if state == "tuned":
        return row.tuned
    if state == "running":
        return row.state is Alive.RUNNING
    if state == "ended":
        return row.state is Alive.ENDED
    if state == "failed":
        return row.state in (Alive.GONE, Alive.CANNOT_TELL) or _failed(row)
    return True


def _failed(row: RunRow) -> bool:
    """Whether the run was seen to end, and not well: `ended (exit 3)`, `ended (SIGKILL)`."""
    return row.state is Alive.ENDED and "(" in row.words and not row.words.endswith("(ok)")


def _table(rows: list[RunRow], chosen: set[str]) -> Component:
    header = [
        html.Th(
            name or html.Span("compare", className="unseen"),
            scope="col",
            className="number" if name in NUMBERS else "pick" if not name else "",
        )
        for name in COLUMNS
    ]
    return html.Div(
        html.Table(
            [html.Thead(html.Tr(header)), html.Tbody([_row(row, chosen) for row in rows])],
            className="runs",
            **{"aria-label": "Runs, newest first"},
        ),
        className="panel scroll",
        tabIndex=0,
        role="region",
        **{"aria-label": "Runs, newest first"},
    )


def _row(row: RunRow, chosen: set[str]) -> Component:
    pick = dmc.Checkbox(
        id={"kind": "runs-pick", "run": row.id},
        checked=row.id in chosen,
        size="xs",
        radius="sm",
        **{"aria-label": f"compare {row.id}"},
    )
    tuned = [" ", html.Span("tuned", className="badge calm")] if row.tuned else []
    ranks = f" · {row.world_size} ranks" if row.world_size > 1 else ""
    command = printable(" ".join((row.script, *row.argv)))
    steps = f"{row.num_steps:,}" if row.num_steps else ""
    step = "" if row.step_ms is None else format_duration(row.step_ms * NS_PER_MS)
    rate = "" if row.samples_per_s is None else format_rate(row.samples_per_s)
    return html.Tr(
        [
            html.Td(pick, className="pick"),
            html.Th(
                [
                    dcc.Link(row.id, href=href(RUN, row.id)),
                    html.Code(command, className="cut", title=command),
                    html.Div(f"{row.started[:16].replace('T', ' ')}{ranks}", className="detail"),
                ],
                scope="row",
            ),
            html.Td([*_standing(row), *tuned]),
            html.Td(steps, className="number", **{"data-label": "steps"}),
            html.Td(step, className="number", **{"data-label": "step"}),
            html.Td(rate, className="number", **{"data-label": "samples/s"}),
            html.Td(printable(row.note or row.verdict)),
        ]
    )


def _standing(row: RunRow) -> list[Component]:
    """Says in a word or two how a run stands, with the rest below."""
    first, _, rest = row.words.partition("; ") if ";" in row.words else row.words.partition(", ")
    tone = {Alive.RUNNING: "live", Alive.ENDED: ""}.get(row.state, "warn")
    if row.state is Alive.ENDED and "(" in first:
        ended = first.partition("(")[2].rstrip(")")
        first, tone = (ended, "alarm") if ended != "ok" else ("ended", "")
    elif row.state is Alive.GONE:
        first, rest = "not closed", row.words.rpartition("; ")[2]
    made = [html.Span(printable(first), className=f"badge {tone}".strip())]
    return [*made, html.Div(printable(rest), className="detail")] if rest else made


def _none(source: Source) -> Component:
    if not source.has_listed:  # of a thousand ranks a row takes a few seconds
        return html.P("Reading the runs ...", className="reading", role="status")
    return empty(
        "No runs yet",
        f"There are no runs under {short_path(str(source.root))}. Record one and it appears here at once:",
        "diagnose run train.py",
    )
