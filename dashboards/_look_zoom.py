"""Which steps the charts of a run show: tabs, links and fields, each of which is an address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dash import ClientsideFunction, Input, Output, dcc, html
from diagnose.dashboards._look_blocks import Component, tabs
from diagnose.dashboards._snapshot import Snapshot
from diagnose.dashboards.base import RUN, href

WINDOWS = {"all": "All steps", "newest": "Newest steps"}
FEWEST_STEPS = 8
"""Fewer than this nobody zooms into with a link; the fields take any range."""
OPEN_END = 10**12
"""More steps than a run has: a range without an end goes on with the run."""
MAX_DIGITS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Zoom:
    """What the address asks the charts to show.

    Attributes:
        window: Of `WINDOWS`, where no range is asked for.
        between: The first step, and the first that is not wanted; `None` for the window.
    """

    window: str = "all"
    between: tuple[int, int] | None = None


def zoom_of(query: Mapping[str, Any]) -> Zoom:
    """Returns what the query of an address asks for; what is no number is not there."""
    window = str(query.get("window", "all"))
    first, last = _number(query.get("from")), _number(query.get("to"))
    between = None
    if first is not None or last is not None:
        begin, end = first or 0, OPEN_END if last is None else last
        between = (begin, end) if begin < end else None
    return Zoom(window=window if window in WINDOWS else "all", between=between)


def _number(text: Any) -> int | None:
    words = str(text) if text is not None else ""
    return int(words[:MAX_DIGITS]) if words.isascii() and words.isdigit() else None


def fields() -> Component:
    """Returns the fields for a range of steps, and the place of what `links` makes."""
    return html.Div(
        [
            html.Div(id="run-windows"),
            html.Div(
                [_field("run-from", "From step", "1"), _field("run-to", "to step", "newest")],
                className="range",
            ),
            dcc.Store(id="run-zoomed"),
        ],
        className="toolbar",
    )


def _field(id: str, label: str, placeholder: str) -> Component:
    field = dcc.Input(
        id=id,
        type="text",
        inputMode="numeric",
        maxLength=MAX_DIGITS,
        placeholder=placeholder,
        autoComplete="off",
        className="field step",
    )
    return html.Div([html.Label(label, htmlFor=id, className="detail"), field], className="labelled")


def links(snap: Snapshot, query: Mapping[str, Any]) -> list[Component]:
    """Returns the windows, and what leads from the steps that are shown to others."""
    zoom = zoom_of(query)
    windows = {words: href(RUN, snap.id, window=name) for name, words in WINDOWS.items()}
    current = "" if zoom.between else WINDOWS[zoom.window]
    first, last = _shown(snap, zoom)
    half, middle = max(1, (last - first) // 2), (first + last) // 2
    fewer = max(min(FEWEST_STEPS, last - first), half)
    ways = {
        "Zoom in": (middle - fewer // 2, middle - fewer // 2 + fewer),
        "Zoom out": (first - half, last + half),
        "Earlier": (first - half, last - half),
        "Later": (first + half, last + half),
    }
    items = [html.Li(_way(snap, words, (first, last), to)) for words, to in ways.items()]
    return [
        tabs(windows, current, "Which steps"),
        html.Ul(items, className="tabs", **{"aria-label": "Zoom"}),
    ]


def _shown(snap: Snapshot, zoom: Zoom) -> tuple[int, int]:
    end = snap.num_steps
    if zoom.between is None:
        return (snap.recent.first if zoom.window == "newest" else 0, end)
    return min(zoom.between[0], end), min(zoom.between[1], end)


def _way(snap: Snapshot, words: str, shown: tuple[int, int], to: tuple[int, int]) -> Component:
    """Returns a link to a range, moved to where there are steps; a link to nowhere where it is shown."""
    end, span = snap.num_steps, min(to[1] - to[0], snap.num_steps)
    first = min(max(0, to[0]), end - span)
    if (first, first + span) == shown or not end:
        # It stays a link: who steps along by the keyboard would lose the place.
        return html.A(words, tabIndex=0, role="link", **{"aria-disabled": "true"})
    if span >= end:
        address = href(RUN, snap.id)
    else:
        address = href(RUN, snap.id, **{"from": str(first), "to": str(first + span)})
    return html.A(words, href=address, **{"data-stay": ""})


def register(app: Any) -> None:
    """Registers what the browser does by itself: a range drawn with the mouse, and the fields."""
    app.clientside_callback(
        ClientsideFunction(namespace="address", function_name="zoomed"),
        Output("run-zoomed", "data"),
        Input("run-ledger", "relayoutData"),
        Input("run-throughput", "relayoutData"),
        prevent_initial_call=True,
    )
    app.clientside_callback(
        ClientsideFunction(namespace="address", function_name="ranged"),
        Output("run-from", "value"),
        Output("run-to", "value"),
        Input("view", "data"),
    )
