"""How the list of runs looks: its rows, its pages, and what stands there when no run does."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from urllib.parse import urlencode

import dash_mantine_components as dmc
from dash import dcc, html
from diagnose.dashboards._listed import RunRow
from diagnose.dashboards._look_blocks import Component
from diagnose.dashboards.base import RUN, RUNS, href

from diagnose.core.liveness import State as Alive
from diagnose.core.units import NS_PER_MS, format_duration, format_rate
from diagnose.report._wording import printable

PER_PAGE = 25
"""Rows of a page: all of them may change in a second, and are then sent anew."""
COLUMNS = ("", "run", "how it stands", "steps", "mean step", "samples/s", "what slows it down")
NUMBERS = ("steps", "mean step", "samples/s")


def table() -> Component:
    """Returns the table without its rows; they come with the first tick."""
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
            [html.Thead(html.Tr(header)), html.Tbody(id="runs-rows")],
            className="runs",
            **{"aria-label": "Runs, newest first"},
        ),
        id="runs-table",
        className="panel scroll",
        tabIndex=0,
        role="region",
        hidden=True,
        **{"aria-label": "Runs, newest first"},
    )


def stamp(row: RunRow, *, picked: bool) -> int:
    """Returns a number that changes with what `row_of` shows."""
    return zlib.crc32(repr((row, picked)).encode())


def row_of(row: RunRow, *, picked: bool) -> Component:
    """Returns a run as a row of the table."""
    pick = dmc.Checkbox(
        checked=picked, size="xs", radius="sm", **{"aria-label": f"compare {row.id}", "data-run": row.id}
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
            html.Td(step, className="number", **{"data-label": "mean step"}),
            html.Td(rate, className="number", **{"data-label": "samples/s"}),
            html.Td(printable(row.note or row.verdict)),
        ]
    )


def _standing(row: RunRow) -> list[Component]:
    """Says in a word or two how a run stands, with the rest below."""
    if not row.is_read:
        return [html.Span(row.words, className="badge calm")]
    first, _, rest = row.words.partition("; ") if ";" in row.words else row.words.partition(", ")
    tone = {Alive.RUNNING: "live", Alive.ENDED: ""}.get(row.state, "warn")
    if row.state is Alive.ENDED and "(" in first:
        ended = first.partition("(")[2].rstrip(")")
        first, tone = (ended, "alarm") if ended != "ok" else ("ended", "")
    elif row.state is Alive.GONE:
        first, rest = "not closed", row.words.rpartition("; ")[2]
    made = [html.Span(printable(first), className=f"badge {tone}".strip())]
    return [*made, html.Div(printable(rest), className="detail")] if rest else made


def page_of(query: Mapping[str, str], count: int) -> int:
    """Returns the page that the address asks for, from 0; of those that are not there the nearest."""
    asked = query.get("page", "")
    number = int(asked[:6]) if asked.isascii() and asked.isdigit() else 1
    return min(max(number, 1), max(1, -(-count // PER_PAGE))) - 1


def pages(query: Mapping[str, str], count: int) -> Component:
    """Returns the links to the other pages; nothing where there is one."""
    last = -(-count // PER_PAGE) - 1
    if last < 1:
        return []
    page = page_of(query, count)
    first = page * PER_PAGE
    targets = {"Newest": 0, "Newer": page - 1, "": page, "Older": page + 1, "Oldest": last}
    items: list[Component] = []
    for name, target in targets.items():
        if not name:
            shown = f"{first + 1:,} to {min(first + PER_PAGE, count):,} of {count:,}"
            items.append(html.Li(html.Span(shown), **{"aria-current": "page"}))
        elif target == page or not 0 <= target <= last:
            items.append(html.Li(html.Span(name, className="note")))
        else:
            items.append(html.Li(dcc.Link(name, href=asked(query, page=str(target + 1) if target else ""))))
    return html.Nav(html.Ul(items, className="tabs"), **{"aria-label": "More runs"})


def asked(query: Mapping[str, str], **fields: str) -> str:
    """Returns the address of the list with some fields of its query changed; an empty one goes."""
    changed = {name: value for name, value in {**query, **fields}.items() if value}
    return f"{href(RUNS)}?{urlencode(changed)}" if changed else href(RUNS)


def comparison(rows: Sequence[RunRow], picked: Sequence[str]) -> Component:
    """Returns what compares the two runs that are picked, or says how to pick them."""
    # The list is newest first; the older of two is what the newer is compared with.
    there = [row.id for row in rows if row.id in picked]
    if len(there) >= 2:
        return dcc.Link(
            "Compare the two", href=href("compare", a=there[-1], b=there[0]), className="button"
        )
    words = f"Pick one more than {there[0]}." if there else "Pick two runs to compare them."
    return html.Span(words, className="note")
