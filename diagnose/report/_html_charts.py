"""Charts as inline SVG: no script, sharp in print, and at any width.

Curves are drawn in a box of 1000 by 1000 that is stretched to the page; what must not be stretched, text
and dots, stands beside it or is placed in percent.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import numpy as np

from diagnose.core.units import NS_PER_MS, format_gain, format_ms, format_share, format_speedup
from diagnose.report._charts import Chart, GainRow, Gains, Mark, PhaseAreas, StepLine, Vector, Waterfall
from diagnose.report._colors import PHASE_COLORS
from diagnose.report._plotly import signed_ms
from diagnose.report._wording import printable

BOX = 1000
TICKS = 4
"""About so many lines across a chart."""
WIDEST_GAIN = 12.0
"""An interval that goes further is cut off at the edge, or the others would be too small to see."""


def chart_svg(chart: Chart) -> str:
    """Draws a chart; nothing for one that only the dashboard has."""
    if isinstance(chart, PhaseAreas):
        return _areas(chart)
    if isinstance(chart, StepLine):
        return _line(chart)
    if isinstance(chart, Waterfall):
        return _waterfall(chart)
    if isinstance(chart, Gains):
        return _gains(chart)
    return ""


def _areas(chart: PhaseAreas) -> str:
    drawn = {phase: times for phase, times in chart.phase_ms.items() if np.any(times)}
    tops = np.cumsum(list(drawn.values()), axis=0)
    highest = float(tops[-1].max())
    # From the highest down, each covers what it does not own: half the numbers of drawing both edges.
    paths = [
        f'<path fill="{PHASE_COLORS[phase]}" d="M0 {BOX}{_stairs(top / highest)}V{BOX}Z"/>'
        for phase, top in reversed(list(zip(drawn, tops, strict=True)))
    ]
    whole = float(tops[-1].sum())
    legend = "".join(
        f'<li><span class="swatch" style="background:{PHASE_COLORS[phase]}"></span>'
        f"{phase.label} {format_share(float(times.sum()) / whole)}</li>"
        for phase, times in drawn.items()
    )
    plot = _plot(chart.title, "ms per step", highest, paths, _Steps(chart, tops.shape[1]))
    return f'<figure class="chart">{plot}<ul class="legend">{legend}</ul></figure>\n'


def _line(chart: StepLine) -> str:
    highest = float(np.nanmax(chart.values)) * 1.05
    path = f'<path class="line" d="M0 {_y(chart.values[0] / highest)}{_stairs(chart.values / highest)}"/>'
    plot = _plot(chart.title, chart.unit, highest, [path], _Steps(chart, len(chart.values)))
    return f'<figure class="chart">{plot}</figure>\n'


def _stairs(heights: Vector) -> str:
    """Returns the path along the tops of bins of equal width, heights from 0 to 1."""
    edges = [round(BOX * number / len(heights)) for number in range(1, len(heights) + 1)]
    return "".join(f"V{_y(height)}H{edge}" for height, edge in zip(heights, edges, strict=True))


def _y(height: float) -> int:
    return round(BOX * (1 - min(1.0, float(height))))


class _Steps:
    """The axis of steps, and what is marked on it."""

    def __init__(self, chart: PhaseAreas | StepLine, num_bins: int) -> None:
        self.first = chart.first
        self.num = max(1, chart.width * num_bins)
        self.marks = chart.marks

    @property
    def ends(self) -> tuple[int, int]:
        return self.first + 1, self.first + self.num

    def marked(self) -> list[tuple[float, Mark]]:
        """Each mark and its place, 0 to 1."""
        placed = [((mark.step - self.first) / self.num, mark) for mark in self.marks]
        return [(at, mark) for at, mark in placed if 0 <= at <= 1]


def _plot(title: str, unit: str, highest: float, paths: Sequence[str], steps: _Steps) -> str:
    lines, labels = [], []
    for value in round_values(highest):
        at = value / highest
        lines.append(f'<path class="grid" d="M0 {_y(at)}H{BOX}"/>')
        labels.append(f'<span class="y" style="bottom:{100 * at:.2f}%">{value:,.6g}</span>')
    drawn = []
    for at, mark in steps.marked():
        drawn.append(
            f'<path class="mark{" strong" if mark.strong else ""}" d="M{round(BOX * at)} 0V{BOX}"/>'
        )
        if mark.strong:
            side = f"right:{100 - 100 * at:.2f}%" if at > 0.5 else f"left:{100 * at:.2f}%"
            labels.append(f'<span class="told" style="{side}">{_escape(mark.label)}</span>')
    labels += [
        f'<span class="x" style="{side}:0">step {end:,}</span>'
        for side, end in zip(("left", "right"), steps.ends, strict=True)
    ]
    spoken = "; ".join(f"{mark.label} at step {mark.step + 1:,}" for _, mark in steps.marked())
    desc = f"<desc>{_escape(spoken)}</desc>" if spoken else ""
    return (
        f'<figcaption>{_escape(title)}, {_escape(unit)}</figcaption><div class="plot">'
        f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img"'
        f' aria-label="{_escape(title)}">'
        f"{desc}{''.join(lines)}{''.join(paths)}{''.join(drawn)}</svg>{''.join(labels)}</div>"
    )


def round_values(highest: float) -> list[float]:
    """Returns a few round values from 0 up to the highest one."""
    if not highest > 0 or not math.isfinite(highest):
        return [0.0]
    rough = highest / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [pace * number for number in range(int(highest / pace + 1e-9) + 1)]


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
        f'<figure class="chart"><figcaption>{_escape(chart.title)}</figcaption>'
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
        f"<div><dt>{_escape(name)}</dt><dd>"
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
        f'<figure class="chart"><figcaption>{_escape(chart.title)}: {key}</figcaption>'
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
        f"<div><dt><code>{_escape(row.label)}</code></dt>"
        f'<dd><svg aria-hidden="true">{"".join(shapes)}</svg>'
        f"<span>{text}{_escape(row.outcome)}</span></dd></div>"
    )


def _escape(text: str) -> str:
    return html.escape(printable(text))
