"""All recorded runs."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import dash
from dash import ClientsideFunction, Input, Output, State, dcc, html
from diagnose.dashboards import _look_runs as look
from diagnose.dashboards._listed import RunRow
from diagnose.dashboards._look_blocks import Component, empty, tabs
from diagnose.dashboards._source import Source
from diagnose.dashboards.base import RUNS, Page, View

from diagnose.core.liveness import State as Alive
from diagnose.report._wording import short_path

STATES: dict[str, tuple[str, Callable[[RunRow], bool]]] = {
    "": ("All", lambda row: True),
    "running": ("Running", lambda row: row.state is Alive.RUNNING),
    "ended": ("Ended", lambda row: row.state is Alive.ENDED),
    "tuned": ("Tuned", lambda row: row.tuned),
    "failed": ("Not closed or failed", lambda row: row.is_read and _failed(row)),
}
"""By the name in the address: how the link is called, and which rows it leaves."""


class Runs(Page):
    """Every recorded run, newest first: search, filter, and pick two to compare."""

    title = "Runs"
    order = 0
    of_run = False
    follows_query = True

    def layout(self, view: View, source: Source) -> Any:
        return html.Div(
            [
                html.Div(
                    [html.H1("Runs"), html.P(id="runs-count", className="under", role="status")],
                    className="title",
                ),
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
                        html.Div(id="runs-states"),
                        html.Div(id="runs-compare", role="status"),
                    ],
                    className="toolbar",
                ),
                dcc.Store(id="runs-drawn"),
                look.table(),
                html.Div(id="runs-none"),
                html.Div(id="runs-pages"),
            ]
        )

    def callbacks(self, app: Any, source: Source) -> None:
        app.clientside_callback(
            ClientsideFunction(namespace="address", function_name="searched"),
            Output("runs-search", "value"),
            Input("view", "data"),
            prevent_initial_call=True,
        )

        @app.callback(  # type: ignore[untyped-decorator]
            Output("runs-rows", "children"),
            Output("runs-table", "hidden"),
            Output("runs-none", "children"),
            Output("runs-count", "children"),
            Output("runs-states", "children"),
            Output("runs-compare", "children"),
            Output("runs-pages", "children"),
            Output("runs-drawn", "data"),
            Input("tick", "n_intervals"),
            Input("view", "data"),
            State("runs-drawn", "data"),
        )
        def refresh(_: int, view: dict[str, Any] | None, drawn: dict[str, Any] | None) -> Any:
            same = (dash.no_update,) * 8
            if not view or view.get("page") != RUNS:
                return same
            query = {str(name): str(value) for name, value in (view.get("query") or {}).items()}
            every = source.runs()
            found = filtered(every, query.get("state", ""), query.get("search", ""))
            first = look.page_of(query, len(found)) * look.PER_PAGE
            shown = found[first : first + look.PER_PAGE]
            picked = query.get("pick", "").split(",")
            words = _count(source, found, every)
            frame = (words, query, [row.id for row in shown], len(found), source.has_listed)
            key = zlib.crc32(repr(frame).encode())
            stamps = [look.stamp(row, picked=row.id in picked) for row in shown]
            known = {"key": key, "rows": stamps}
            if known == drawn:
                return same
            if drawn and drawn.get("key") == key:
                changed = dash.Patch()  # of a list that goes on, a row or two
                for place, row in enumerate(shown):
                    if stamps[place] != drawn["rows"][place]:
                        changed[place] = look.row_of(row, picked=row.id in picked)
                return (changed, *same[:-2], known)
            return (
                [look.row_of(row, picked=row.id in picked) for row in shown],
                not shown,
                _none(source, every, query) if not shown else [],
                words,
                _states(query),
                look.comparison(every, picked),
                look.pages(query, len(found)),
                known,
            )


def _states(query: Mapping[str, str]) -> Component:
    states = {words: look.asked(query, state=state, page="") for state, (words, _) in STATES.items()}
    current, _ = STATES.get(query.get("state", ""), ("", None))
    return tabs(states, current, "Which runs")


def _count(source: Source, found: Sequence[RunRow], every: Sequence[RunRow]) -> str:
    if not every:
        return ""
    shown = f"{len(found):,} of {len(every):,}" if len(found) < len(every) else f"{len(every):,}"
    unread = sum(not row.is_read for row in every)
    still = f"; {unread:,} are still being read" if unread else ""
    return f"{shown} under {short_path(str(source.root))}, newest first{still}"


def filtered(rows: Sequence[RunRow], state: str, search: str) -> list[RunRow]:
    """Returns the rows that stand as `state` says, and in which each word of the search is found."""
    words = search.lower().split()
    _, stands = STATES.get(state, STATES[""])
    return [
        row
        for row in rows
        if stands(row)
        and all(
            word in f"{row.id} {row.script} {' '.join(row.argv)} {row.verdict}".lower() for word in words
        )
    ]


def _failed(row: RunRow) -> bool:
    """Whether the run is not known to have been closed, or was seen to end, and not well: `ended (exit 3)`,
    `ended (SIGKILL)`."""
    if row.state is Alive.ENDED:
        return "(" in row.words and not row.words.endswith("(ok)")
    return row.state is not Alive.RUNNING


def _none(source: Source, every: Sequence[RunRow], query: Mapping[str, str]) -> Component:
    if not source.has_listed:
        return html.P("Reading the runs ...", className="reading", role="status")
    if every:
        return empty("No run matches", "Clear the search, or choose another filter.")
    return empty(
        "No runs yet",
        f"There are no runs under {short_path(str(source.root))}. Record one and it appears here at once:",
        "diagnose run train.py",
    )
