"""The blocks of the report as Dash components: the same words and figures as everywhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash_mantine_components as dmc
from dash import dcc, html

from diagnose.core.phases import Phase
from diagnose.core.units import format_share
from diagnose.report._charts import Chart
from diagnose.report._colors import PHASE_COLORS, text_on
from diagnose.report._plotly import CONFIG, figure
from diagnose.report._wording import bar_label, printable, spans
from diagnose.report.base import Block, Card, Column, Fact, Facts, Paragraph, PhaseBar, Row, Table

Component = Any
"""Dash gives its components no common type that mypy knows."""


def shown(blocks: Sequence[Block]) -> list[Component]:
    """Returns each block as a component."""
    return [_block(block) for block in blocks]


def chart(
    drawn: Chart, *, height: int | None = None, id: str | None = None, captioned: bool = False
) -> Component:
    """Returns a chart with what it shows in words; its bar of buttons is off, and it is never uploaded."""
    made = figure(drawn)
    tall = height or made["layout"].get("height", 280)
    named = {"id": id} if id else {}
    graph = dcc.Graph(figure=made, config=CONFIG, responsive=True, style={"height": f"{tall}px"}, **named)
    caption = [html.Figcaption(printable(drawn.title))] if captioned else []
    plot = html.Div(graph, role="img", **{"aria-label": drawn.title})
    return html.Figure([*caption, plot], className="chart")


def prose(text: str) -> list[Component]:
    """Returns a sentence whose backticks become code."""
    return [html.Code(printable(piece)) if is_code else printable(piece) for piece, is_code in spans(text)]


def code_block(lines: str) -> Component:
    """Returns lines to paste, with the button that copies them."""
    text = "\n".join(printable(line) for line in lines.splitlines())
    return html.Div(
        [
            html.Pre(html.Code(text), tabIndex=0),
            dcc.Clipboard(content=text, className="copy", title="Copy"),
        ],
        className="snippet",
    )


def _block(block: Block) -> Component:
    if isinstance(block, Paragraph):
        words = html.P(printable(block.text), className="alarm" if block.alarm else "words")
        return html.Div([words, code_block(block.code)]) if block.code else words
    if isinstance(block, Facts):
        return html.Dl(
            [_fact(fact) for fact in block.items], className="kpis" if block.headline else "facts"
        )
    if isinstance(block, PhaseBar):
        return phase_bar(block)
    if isinstance(block, Card):
        return _card(block)
    if isinstance(block, Table):
        return table(block)
    return chart(block, captioned=True)


def _fact(fact: Fact) -> Component:
    value = html.Code(printable(fact.value)) if fact.code else printable(fact.value)
    detail = [html.Span(printable(fact.detail), className="detail")] if fact.detail else []
    return html.Div([html.Dt(fact.label), html.Dd([html.Span(value, className="value"), *detail])])


def _card(card: Card) -> Component:
    advice = [html.P([html.B("To do"), " ", *prose(card.advice)])] if card.advice else []
    code = [code_block(card.code)] if card.code else []
    return html.Article(
        [
            html.H3(prose(card.title)),
            html.P([html.Code(printable(tag)) for tag in card.tags], className="tags"),
            html.Dl([_fact(fact) for fact in card.facts], className="facts wide"),
            html.Ul([html.Li(prose(point)) for point in card.points]),
            html.Div([*advice, *code], className="advice"),
            html.P(prose(card.caveat), className="detail"),
        ],
        className="finding",
    )


def phase_bar(bar: PhaseBar) -> Component:
    """Returns the whole step as one bar; each part says its phase where there is room, and on hovering."""
    spoken = ", ".join(
        f"{phase.label} {format_share(share)}" for phase, share in bar.shares.items() if share
    )
    return html.Div(
        [_part(phase, share) for phase, share in bar.shares.items() if share > 0],
        className="stepbar",
        role="img",
        **{"aria-label": f"{bar.title}: {spoken}"},
    )


def _part(phase: Phase, share: float) -> Component:
    color, percent = PHASE_COLORS[phase], format_share(share)
    style = {"width": f"{100 * share:.3f}%", "background": color, "color": text_on(color)}
    return html.Span(bar_label(phase, share), style=style, title=f"{phase.label} {percent}")


def swatch(phase: Phase) -> Component:
    """Returns a square in the phase's colour; its name stands beside it."""
    return html.Span(className="swatch", style={"background": PHASE_COLORS[phase]})


def table(shown: Table) -> Component:
    """Returns a plain table, which a screen reader walks and a browser's search finds."""
    has_bar = any(row.share is not None for row in shown.rows)
    header = [html.Th(column.title, scope="col", className=_classes(column)) for column in shown.columns]
    header += [html.Th("", className="bar", **{"aria-hidden": "true"})] if has_bar else []
    body = [made for row in shown.rows for made in _rows(row, shown.columns, has_bar)]
    caption = printable(shown.caption)
    return html.Figure(
        [
            html.Figcaption(caption),
            html.Div(
                html.Table(
                    [html.Thead(html.Tr(header)), html.Tbody(body)],
                    className="lines" if any(row.source for row in shown.rows) else "",
                    **{"aria-label": caption},
                ),
                className="scroll",
                tabIndex=0,
                role="region",
                **{"aria-label": caption},
            ),
        ],
        className="table",
    )


def _rows(row: Row, columns: Sequence[Column], has_bar: bool) -> list[Component]:
    cells = []
    for column, text in zip(columns, row.cells, strict=True):
        content: list[Component] = [html.Code(printable(text)) if column.code else printable(text)]
        if row.phase and text == row.phase.label:
            content = [swatch(row.phase), *content]
        first = column is columns[0] and not column.number
        cells.append(
            html.Th(content, scope="row", className=_classes(column))
            if first
            else html.Td(content, className=_classes(column))
        )
    if has_bar:
        color = PHASE_COLORS[row.phase or Phase.OTHER]
        drawn = (
            html.Span(style={"width": f"{100 * row.share:.2f}%", "background": color}) if row.share else ""
        )
        cells.append(html.Td(drawn, className="bar"))
    made = [html.Tr(cells, className="total" if has_bar and row.share is None else "")]
    if row.source:
        width = len(columns) + has_bar
        made.append(html.Tr(html.Td(html.Code(printable(row.source)), colSpan=width), className="source"))
    return made


def _classes(column: Column) -> str:
    return " ".join([*(["number"] if column.number else []), *(["code"] if column.code else [])])


def panel(title: str, *children: Component, note: str = "") -> Component:
    """Returns a titled part of a page."""
    head = [html.H2(title), *([html.P(note, className="note")] if note else [])]
    return dmc.Paper(html.Section([html.Div(head, className="head"), *children]), className="panel")


def empty(title: str, text: str, code: str = "") -> Component:
    """Returns what stands where there is nothing to show: why, and what would change that."""
    command = [code_block(code)] if code else []
    return html.Div([html.H2(title), html.P(prose(text)), *command], className="empty")


def tabs(addresses: Mapping[str, str], current: str, label: str) -> Component:
    """Returns links to the variants of a page, of which one is shown."""
    items = [
        html.Li(dcc.Link(words, href=address), **({"aria-current": "true"} if words == current else {}))
        for words, address in addresses.items()
    ]
    return html.Ul(items, className="tabs", **{"aria-label": label})
