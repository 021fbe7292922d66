"""Charts as inline SVG: no script, sharp in print, and at any width."""

from __future__ import annotations

from diagnose.core.units import NS_PER_MS, format_gain, format_ms, format_speedup
from diagnose.report._charts import (
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
from diagnose.report._plotly import signed_ms

WIDEST_GAIN = 12.0
"""An interval that goes further is cut off at the edge, or the others would be too small to see."""


def chart_svg(chart: Chart) -> str:
    """Draws a chart; nothing for that of commits, which no report of one run has."""
    if isinstance(chart, PhaseAreas):
        return areas(chart)
    if isinstance(chart, StepLine):
        return step_line(chart)
    if isinstance(chart, StepLines):
        return step_lines(chart)
    if isinstance(chart, TimeLines):
        return time_lines(chart)
    if isinstance(chart, Waterfall):
        return _waterfall(chart)
    if isinstance(chart, Gains):
        return _gains(chart)
    if isinstance(chart, RankMap):
        return rank_map(chart)
    if isinstance(chart, Roofline):
        return roofline(chart)
    return ""


def _waterfall(chart: Waterfall) -> str:
    level = sum(chart.before_ns.values())
    after = sum(chart.after_ns.values())
    highest = max(level, after, *_levels(chart))
    rows = [_bar(chart.names[0], 0.0, level, highest, "whole", format_ms(level))]
    for phase, change in chart.changes:
        low, kind = min(level, level + change), "better" if change < 0 else "worse"
        rows.append(_bar(phase.label, low, abs(change), highest, kind, signed_ms(change)))
        level += change
    rows.append(_bar(chart.names[1], 0.0, after, highest, "whole", format_ms(after)))
    return (
        f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>'
        f'<dl class="bars">{"".join(rows)}</dl></figure>\n'
    )


def _levels(chart: Waterfall) -> list[float]:
    level = sum(chart.before_ns.values())
    levels = []
    for _, change in chart.changes:
        level += change
        levels.append(level)
    return levels or [NS_PER_MS]


def _bar(name: str, start: float, length: float, whole: float, kind: str, text: str) -> str:
    left, width = 100 * start / whole, max(0.15, 100 * length / whole)
    return (
        f"<div><dt>{escape(name)}</dt><dd>"
        f'<svg aria-hidden="true"><rect class="{kind}" x="{left:.2f}%" width="{width:.2f}%" height="100%"/>'
        "</svg>"
        f"<span>{text}</span></dd></div>"
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
