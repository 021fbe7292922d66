"""The report as one HTML file: nothing loaded, every foreign name escaped, no script unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from diagnose import __version__
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, Status
from diagnose.core.units import format_share
from diagnose.report import _html_interactive
from diagnose.report._charts import Chart
from diagnose.report._colors import PHASE_COLORS, text_on
from diagnose.report._html_axes import escape
from diagnose.report._html_charts import chart_svg
from diagnose.report._html_style import STYLE
from diagnose.report._wording import bar_label, how_it_ended, spans, started
from diagnose.report.base import Block, Card, Column, Fact, Facts, Paragraph, PhaseBar, Row, Table, document

Draw = Callable[[Chart], str]

# The reader's browser then refuses what this file must never contain.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STATUS_WORDS = {
    Status.OK: "measured",
    Status.NO_STEPS: "no steps seen",
    Status.TOO_FEW_STEPS: "too few steps",
    Status.SCRIPT_FAILED: "script failed",
}


def to_html(profile: Profile, *, interactive: bool = False) -> str:
    """Writes the whole report as one HTML file.

    Args:
        profile: The run.
        interactive: Draw the charts with plotly.js, which then is part of the file: zoom and figures on
            hovering, for 5 MB.
    """
    draw = _html_interactive.chart_interactive if interactive else chart_svg
    scripts = _html_interactive.scripts() if interactive else ()
    style = STYLE + _html_interactive.STYLE if interactive else STYLE
    policy = _html_interactive.policy(scripts) if interactive else POLICY
    run = profile.run
    under = [run.id, started(run), f"torch {run.torch}" if run.torch else "", run.device]
    alarm = "" if profile.status is Status.OK and how_it_ended(run) is None else " alarm"
    return "".join(
        (
            "<!doctype html>\n",
            '<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{escape(run.script)} - {escape(run.id)}</title>\n",
            f"<style>{style}</style>\n</head>\n<body>\n<header>\n",
            f'<p class="eyebrow">diagnose report</p>\n<h1>{escape(run.script)}</h1>\n',
            f'<p class="under"><span class="badge{alarm}">{STATUS_WORDS[profile.status]}</span> ',
            " · ".join(escape(part) for part in under if part),
            "</p>\n</header>\n<main>\n",
            *(_section(title, blocks, draw) for title, blocks in document(profile)),
            f"</main>\n<footer>Written by diagnose {escape(__version__)}.</footer>\n",
            *(f"<script>{script}</script>\n" for script in scripts),
            "</body>\n</html>\n",
        )
    )


def _section(title: str, blocks: Sequence[Block], draw: Draw) -> str:
    heading = f"<h2>{escape(title)}</h2>\n" if title else ""
    return f"<section>\n{heading}{''.join(_block(block, draw) for block in blocks)}</section>\n"


def _block(block: Block, draw: Draw) -> str:
    if isinstance(block, Paragraph):
        alarm = ' class="alarm"' if block.alarm else ""
        return f"<p{alarm}>{escape(block.text)}</p>\n{_code(block.code)}"
    if isinstance(block, Facts):
        headline = ' class="headline"' if block.headline else ""
        return f"<dl{headline}>\n{''.join(_fact(fact) for fact in block.items)}</dl>\n"
    if isinstance(block, PhaseBar):
        return _phase_bar(block)
    if isinstance(block, Card):
        return _card(block)
    if isinstance(block, Table):
        return _table(block)
    return draw(block)


def _prose(text: str) -> str:
    return "".join(
        f"<code>{escape(piece)}</code>" if is_code else escape(piece) for piece, is_code in spans(text)
    )


def _code(lines: str) -> str:
    shown = "\n".join(escape(line) for line in lines.splitlines())
    return f'<pre tabindex="0"><code>{shown}</code></pre>\n' if shown else ""


def _card(card: Card) -> str:
    tags = "".join(f"<code>{escape(tag)}</code> " for tag in card.tags)
    points = "".join(f"<li>{_prose(point)}</li>\n" for point in card.points)
    advice = f"<p><b>To do</b> {_prose(card.advice)}</p>\n" if card.advice else ""
    return (
        f'<article>\n<h3>{_prose(card.title)}</h3>\n<p class="tags">{tags}</p>\n'
        f"<dl>\n{''.join(map(_fact, card.facts))}</dl>\n<ul>\n{points}</ul>\n"
        f'<div class="advice">{advice}{_code(card.code)}</div>\n'
        f'<p class="detail">{_prose(card.caveat)}</p>\n</article>\n'
    )


def _fact(fact: Fact) -> str:
    value = f"<code>{escape(fact.value)}</code>" if fact.code else escape(fact.value)
    detail = f' <span class="detail">{escape(fact.detail)}</span>' if fact.detail else ""
    return f"<div><dt>{escape(fact.label)}</dt><dd>{value}{detail}</dd></div>\n"


def _phase_bar(bar: PhaseBar) -> str:
    """Draws the step as one bar. In percent of its width, so that text is never stretched."""
    parts, left = [], 0.0
    spoken = [f"{phase.label} {format_share(share)}" for phase, share in bar.shares.items() if share]
    for phase, share in bar.shares.items():
        if share > 0:
            parts.append(_part(phase, left, share))
        left += share
    desc = escape(", ".join(spoken))
    return (
        '<svg class="step" role="img" aria-labelledby="step-title step-desc">'
        f'<title id="step-title">{escape(bar.title)}</title><desc id="step-desc">{desc}</desc>\n'
        f"{''.join(parts)}</svg>\n"
    )


def _part(phase: Phase, left: float, share: float) -> str:
    color, percent = PHASE_COLORS[phase], format_share(share)
    label = bar_label(phase, share)
    text = (
        f'<text x="{100 * (left + share / 2):.3f}%" y="50%" fill="{text_on(color)}">{label}</text>'
        if label
        else ""
    )
    return (
        f"<g><title>{phase.label} {percent}</title>"
        f'<rect x="{100 * left:.3f}%" width="{100 * share:.3f}%" height="100%" fill="{color}"/>{text}</g>\n'
    )


def _table(table: Table) -> str:
    has_bar = any(row.share is not None for row in table.rows)
    header = "".join(
        f'<th scope="col"{_classes(column, code=False)}>{escape(column.title)}</th>'
        for column in table.columns
    )
    header += '<th scope="col" class="bar" aria-hidden="true"></th>' if has_bar else ""
    rows = "".join(_row(row, table.columns, has_bar) for row in table.rows)
    caption = escape(table.caption)
    lines = ' class="lines"' if any(row.source for row in table.rows) else ""
    # A table wider than the window scrolls by itself; tabindex lets the keyboard scroll it too.
    return (
        f"<figure>\n<figcaption>{caption}</figcaption>\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}">'
        f'<table{lines} aria-label="{caption}">\n'
        f"<thead><tr>{header}</tr></thead>\n<tbody>\n{rows}</tbody>\n</table></div>\n</figure>\n"
    )


def _row(row: Row, columns: tuple[Column, ...], has_bar: bool) -> str:
    cells = []
    color = PHASE_COLORS[row.phase or Phase.OTHER]
    swatch = f'<span class="swatch" style="background:{color}"></span>'
    for column, text in zip(columns, row.cells, strict=True):
        content = f"<code>{escape(text)}</code>" if column.code else escape(text)
        if row.phase and text == row.phase.label:
            content = swatch + content
        tag = 'th scope="row"' if column is columns[0] and not column.number else "td"
        cells.append(f"<{tag}{_classes(column)}>{content}</{tag.split()[0]}>")
    if has_bar and row.share is not None:
        length = f"width:{100 * row.share:.2f}%;background:{color}"
        drawn = f'<span style="{length}"></span>' if row.share else ""
        cells.append(f'<td class="bar">{drawn}</td>')
    total = ' class="total"' if has_bar and row.share is None else ""
    if total:
        cells.append('<td class="bar"></td>')
    return f"<tr{total}>{''.join(cells)}</tr>\n{_source(row, columns) if row.source else ''}"


def _source(row: Row, columns: tuple[Column, ...]) -> str:
    """Returns the row of a source line, which begins below the first column of names."""
    before = next((index for index, column in enumerate(columns) if column.code), 0)
    blank = f'<td colspan="{before}"></td>' if before else ""
    source = f'<td colspan="{len(columns) - before}"><code>{escape(row.source)}</code></td>'
    return f'<tr class="source">{blank}{source}</tr>\n'


def _classes(column: Column, *, code: bool = True) -> str:
    names = ["number"] if column.number else []
    names += ["code"] if column.code and code else []
    return f' class="{" ".join(names)}"' if names else ""
