"""Charts as inline SVG: no script, sharp in print, and at any width."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from diagnose.core.units import NS_PER_MS, format_gain, format_speedup
from diagnose.report._charts import (
    Bar,
    Chart,
    GainRow,
    Gains,
    PhaseAreas,
    RankMap,
    Roofline,
    StepLine,
    StepLines,
    TimeLines,
    Waterfall,
)
from diagnose.report._html_axes import escape
from diagnose.report._html_lines import areas, step_line, step_lines, time_lines
from diagnose.report._html_maps import rank_map, roofline

WIDEST_GAIN = 12.0
"""An interval that goes further is cut off at the edge, or the others would be too small to see."""


def _waterfall(chart: Waterfall) -> str:
    bars = chart.bars
    whole_ns = max(bar.start_ns + bar.length_ns for bar in bars) or NS_PER_MS
    rows = "".join(_bar(bar, whole_ns) for bar in bars)
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>'
        f'<dl class="bars">{rows}</dl></figure>\n'
    )


def _bar(bar: Bar, whole_ns: float) -> str:
    left, width = 100 * bar.start_ns / whole_ns, max(0.15, 100 * bar.length_ns / whole_ns)
    return (
        f'<div><dt>{escape(bar.name)}</dt><dd><svg aria-hidden="true">'
        f'<rect class="{bar.kind}" x="{left:.2f}%" width="{width:.2f}%" height="100%"/></svg>'
        f"<span>{bar.text}</span></dd></div>"
    )


def _gains(chart: Gains) -> str:
    ends = [end for row in chart.rows for end in (row.predicted, *(row.interval or ())) if end is not None]
    highest = min(WIDEST_GAIN, max([1.25, *ends])) * 1.04
    rows = "".join(_gain(row, highest) for row in chart.rows)
    key = "dots with their interval are measured, diamonds predicted; the line is no change"
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}: {key}</figcaption>'
        f'<dl class="bars gains">{rows}</dl></figure>\n'
    )


def _gain(row: GainRow, highest: float) -> str:
    def at(speedup: float) -> str:
        return f"{100 * min(speedup, highest) / highest:.2f}%"

    kind = "better" if row.kept else "rest"
    shapes = [f'<line class="none" x1="{at(1)}" x2="{at(1)}" y1="0" y2="100%"/>']
    text = ""
    if row.speedup is not None:
        low, high = row.interval or (row.speedup, row.speedup)
        text = f"{format_gain(row.speedup, low, high)}, "
        shapes.append(f'<line class="{kind}" x1="{at(low)}" x2="{at(high)}" y1="50%" y2="50%"/>')
        shapes.append(f'<circle class="{kind}" cx="{at(row.speedup)}" cy="50%" r="5"/>')
    if row.predicted is not None:
        text += f"predicted {format_speedup(row.predicted)}, "
        place = f'<svg x="{at(row.predicted)}" y="50%" overflow="visible">'
        shapes.append(f'{place}<path class="predicted" d="M0-6L6 0L0 6L-6 0Z"/></svg>')
    return (
        f"<div><dt><code>{escape(row.label)}</code></dt>"
        f'<dd><svg aria-hidden="true">{"".join(shapes)}</svg>'
        f"<span>{text}{escape(row.outcome)}</span></dd></div>"
    )


DRAWINGS: Mapping[type, Callable[[Any], str]] = {
    PhaseAreas: areas,
    StepLine: step_line,
    StepLines: step_lines,
    TimeLines: time_lines,
    Waterfall: _waterfall,
    Gains: _gains,
    RankMap: rank_map,
    Roofline: roofline,
}


def chart_svg(chart: Chart) -> str:
    """Draws a chart; nothing for that of commits, which no report of one run has."""
    draw = DRAWINGS.get(type(chart))
    return draw(chart) if draw is not None else ""
