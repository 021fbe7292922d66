"""Charts as plotly figures: plain dicts, since on a live page validating one costs more than drawing it.

Colours of text, grid and background are left to the page's style sheet, so that one figure serves dark and
light. Names of the user's are escaped: plotly reads tags in every text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS, format_gain
from diagnose.report._charts import (
    Chart,
    GainRow,
    Gains,
    Levels,
    PhaseAreas,
    RankMap,
    Roofline,
    StepLine,
    StepLines,
    TimeLines,
    Vector,
    Waterfall,
)
from diagnose.report._colors import PHASE_COLORS, SHADES
from diagnose.report._plotly_axes import NEUTRAL, axes, cut_off, escaped, packed, step_axes, vertical_line
from diagnose.report._plotly_lines import BETTER, LINE, WORSE, step_line, step_lines, time_lines
from diagnose.report._plotly_roofline import roofline

CONFIG = {
    "displayModeBar": False,
    "displaylogo": False,
    "showSendToCloud": False,
    "plotlyServerURL": "",
    "responsive": True,
    "scrollZoom": False,
    "doubleClickDelay": 500,
}
"""plotly.js offers to upload every chart unless it is told not to."""

BAR_COLORS = {"whole": NEUTRAL, "better": BETTER, "worse": WORSE}


def phase_areas(chart: PhaseAreas) -> dict[str, Any]:
    """Stacks the phases, the first in a step's order at the bottom."""
    num_bins = _num_bins(chart.phase_ms)
    lone = num_bins == 1
    data = [
        {
            "type": "bar" if lone else "scatter",
            "name": phase.label,
            "x0": chart.steps.first + 1,
            "dx": chart.steps.width,
            "y": packed(times),
            "hovertemplate": "%{y:,.3~g} ms",
            **({"marker": {"color": PHASE_COLORS[phase]}} if lone else _area(PHASE_COLORS[phase])),
        }
        for phase, times in chart.phase_ms.items()
        if np.any(times)
    ]
    layout = step_axes("ms per step", chart.steps, num_bins)
    cut_off(layout, np.sum([np.asarray(times) for times in chart.phase_ms.values()], axis=0), "ms")
    if lone:
        layout |= {"barmode": "stack", "bargap": 0.7}
        layout["xaxis"] |= {"tickvals": [chart.steps.first + 1]}
    return {"data": data, "layout": layout}


def waterfall(chart: Waterfall) -> dict[str, Any]:
    """Draws the two steps as bars and each phase's change hanging between them."""
    bars = chart.bars
    trace = {
        "type": "bar",
        "x": [escaped(bar.name) for bar in bars],
        "base": [bar.start_ns / NS_PER_MS for bar in bars],
        "y": [bar.length_ns / NS_PER_MS for bar in bars],
        "marker": {"color": [BAR_COLORS[bar.kind] for bar in bars]},
        "text": [bar.text for bar in bars],
        "textposition": "outside",
        "cliponaxis": False,
        "hovertemplate": "%{x}: %{text}<extra></extra>",
    }
    layout = axes("ms per step")
    layout["xaxis"] |= {"showgrid": False, "type": "category"}
    layout["bargap"] = 0.35
    layout["hovermode"] = "closest"
    return {"data": [trace], "layout": layout}


def gains(chart: Gains) -> dict[str, Any]:
    """Draws each measured speedup with its interval, and what was expected as a hollow diamond."""
    rows = list(reversed(chart.rows))
    labels = [escaped(row.label) for row in rows]
    data = [_intervals(rows, labels, kept=kept) for kept in (True, False)]
    predicted = {
        "type": "scatter",
        "mode": "markers",
        "name": "predicted",
        "x": [row.predicted for row in rows],
        "y": labels,
        "marker": {"symbol": "diamond-open", "size": 11, "color": NEUTRAL, "line": {"width": 2}},
        "hovertemplate": "predicted %{x:.3~g}x<extra></extra>",
    }
    layout = axes("")
    layout["xaxis"] |= {"title": {"text": "times as fast"}, "ticksuffix": "x", "showgrid": True}
    layout["yaxis"] |= {"showgrid": False, "type": "category", "automargin": True, "rangemode": "normal"}
    layout["yaxis"] |= {"categoryorder": "array", "categoryarray": labels, "range": [-0.6, len(rows) - 0.4]}
    layout["shapes"] = [vertical_line(1.0, dash="solid")]
    layout["height"] = 130 + 34 * len(rows)
    layout["margin"]["b"] = 52
    layout["hovermode"] = "closest"
    layout["showlegend"] = True
    layout["legend"] = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0}
    return {"data": [*data, predicted], "layout": layout}


def rank_map(chart: RankMap) -> dict[str, Any]:
    """Shades each rank's row."""
    highest = float(np.nanmax(chart.values_ms)) if np.isfinite(chart.values_ms).any() else 0.0
    trace = {
        "type": "heatmap",
        "x0": chart.steps.first + 1,
        "dx": chart.steps.width,
        "y": list(chart.labels) or [f"rank {rank}" for rank in chart.ranks],
        "z": packed(np.clip(chart.values_ms, 0, None)),
        "colorscale": [[at / (len(SHADES) - 1), shade] for at, shade in enumerate(SHADES)],
        "zmin": 0,
        "zmax": highest or 1.0,
        "colorbar": {"title": {"text": "ms"}, "thickness": 10, "outlinewidth": 0, "len": 1.0},
        "hovertemplate": "%{y}, step %{x:,}: %{z:,.3~g} ms<extra></extra>",
    }
    layout = step_axes("", chart.steps, chart.values_ms.shape[1])
    layout["yaxis"] |= {"type": "category", "autorange": "reversed", "showgrid": False, "automargin": True}
    for axis in ("xaxis", "yaxis"):
        layout[axis] |= {"showline": True, "mirror": True, "linecolor": NEUTRAL, "linewidth": 1}
    layout["height"] = 110 + max(60, min(18 * len(chart.ranks), 620))
    layout["hovermode"] = "closest"
    return {"data": [trace], "layout": layout}


def levels(chart: Levels) -> dict[str, Any]:
    """Draws each commit's median on its single measurements, and a line where the level changed."""
    places = list(range(len(chart.values)))
    singles = {
        "type": "scatter",
        "mode": "markers",
        "name": "single runs",
        "x": [place for place, runs in zip(places, chart.singles, strict=True) for _ in runs],
        "y": [value for runs in chart.singles for value in runs],
        "marker": {"color": NEUTRAL, "size": 5, "opacity": 0.6},
        "hoverinfo": "skip",
    }
    medians = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": "median",
        "x": places,
        "y": list(chart.values),
        "text": [escaped(label) for label in chart.labels],
        "line": {"color": LINE, "width": 1.75},
        "marker": {"color": LINE, "size": 7},
        "hovertemplate": f"%{{text}}: %{{y:,.4~g}} {escaped(chart.unit)}<extra></extra>",
    }
    layout = axes(escaped(chart.unit))
    few = places[:: max(1, len(places) // 8)]
    layout["xaxis"] |= {"tickvals": few, "ticktext": [escaped(chart.labels[at]) for at in few]}
    layout["xaxis"] |= {"showgrid": False}
    layout["shapes"] = [vertical_line(at - 0.5, dash="dash", width=2) for at in chart.changes]
    layout["hovermode"] = "closest"
    return {"data": [singles, medians], "layout": layout}


def _num_bins(columns: Mapping[Phase, Vector]) -> int:
    return max((len(times) for times in columns.values()), default=0)


def _area(color: str) -> dict[str, Any]:
    """An opaque area in steps: plotly would let what lies below shine through."""
    line = {"width": 0, "shape": "hv"}
    return {"mode": "lines", "stackgroup": "step", "line": line, "fillcolor": color}


def _intervals(rows: Sequence[GainRow], labels: Sequence[str], *, kept: bool) -> dict[str, Any]:
    shown = [
        (label, row.outcome, row.speedup, *(row.interval or (row.speedup, row.speedup)))
        for row, label in zip(rows, labels, strict=True)
        if row.kept is kept and row.speedup is not None
    ]
    color = BETTER if kept else NEUTRAL
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "kept" if kept else "not kept",
        "x": [speedup for _, _, speedup, _, _ in shown],
        "y": [label for label, _, _, _, _ in shown],
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": [high - speedup for _, _, speedup, _, high in shown],
            "arrayminus": [speedup - low for _, _, speedup, low, _ in shown],
            "color": color,
            "thickness": 2,
            "width": 5,
        },
        "marker": {"symbol": "circle" if kept else "x", "size": 11 if kept else 9, "color": color},
        "customdata": [
            f"{format_gain(speedup, low, high)}, {escaped(outcome)}"
            for _, outcome, speedup, low, high in shown
        ],
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
    }


FIGURES: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    PhaseAreas: phase_areas,
    StepLine: step_line,
    StepLines: step_lines,
    TimeLines: time_lines,
    Waterfall: waterfall,
    Gains: gains,
    RankMap: rank_map,
    Levels: levels,
    Roofline: roofline,
}


def figure(chart: Chart) -> dict[str, Any]:
    """Draws any chart."""
    return FIGURES[type(chart)](chart)
