"""Lines over the steps and over the run's clock as plotly figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from diagnose.report._charts import StepLine, StepLines, TimeLines, Vector
from diagnose.report._plotly_axes import NEUTRAL, axes, cut_off, escaped, packed, step_axes

LINE, BETTER, WORSE = "#3975c9", "#35a06f", "#e06a2f"
STROKES = ((LINE, "solid"), (WORSE, "dash"), (NEUTRAL, "dot"), (BETTER, "dashdot"))


def step_line(chart: StepLine) -> dict[str, Any]:
    """Draws one line, broken where nothing was measured."""
    trace = {
        "type": "scatter",
        "mode": "lines" if len(chart.values) > 1 else "markers",
        "name": escaped(chart.unit),
        "x0": chart.steps.first + 1,
        "dx": chart.steps.width,
        "y": packed(chart.values),
        "line": {"color": LINE, "width": 1.75},
        "marker": {"color": LINE, "size": 8},
        "hovertemplate": f"%{{y:,.4~g}} {escaped(chart.unit)}<extra></extra>",
    }
    layout = step_axes(escaped(chart.unit), chart.steps, len(chart.values))
    cut_off(layout, chart.values, chart.unit)
    if len(chart.values) == 1:
        layout["xaxis"] |= {"tickvals": [chart.steps.first + 1]}
    return {"data": [trace], "layout": layout}


def step_lines(chart: StepLines) -> dict[str, Any]:
    """Draws a few lines over the steps, told apart by colour and by dashes."""
    places = {"x0": chart.steps.first + 1, "dx": chart.steps.width}
    data = _told_apart(chart.lines, chart.unit, places, ".4~g")
    num_bins = max(map(len, chart.lines.values()), default=0)
    layout = step_axes(escaped(chart.unit), chart.steps, num_bins)
    if chart.logarithmic:
        layout["yaxis"] |= {"type": "log", "rangemode": "normal", "exponentformat": "power", "dtick": 1}
    _name_lines(layout, len(data), below=len(layout["annotations"]) > 0)
    return {"data": data, "layout": layout}


def time_lines(chart: TimeLines) -> dict[str, Any]:
    """Draws likewise over the run's clock."""
    data = _told_apart(chart.lines, chart.unit, {"x": packed(chart.seconds)}, ".3~g")
    layout = axes(escaped(chart.unit))
    layout["xaxis"] |= {"title": {"text": "seconds since the first step"}, "showgrid": False}
    layout["hovermode"] = "x unified"
    _name_lines(layout, len(data))
    return {"data": data, "layout": layout}


def _told_apart(
    lines: Mapping[str, Vector], unit: str, places: dict[str, Any], digits: str
) -> list[dict[str, Any]]:
    drawn = {name: values for name, values in lines.items() if np.isfinite(values).any()}
    return [
        {
            "type": "scatter",
            "mode": "lines" if np.isfinite(values).sum() > 1 else "markers",
            "name": escaped(name),
            **places,
            "y": packed(values),
            "line": {"color": color, "width": 1.75, "dash": dash},
            "hovertemplate": f"%{{y:,{digits}}} {escaped(unit)}",
        }
        for (name, values), (color, dash) in zip(drawn.items(), STROKES, strict=False)
    ]


def _name_lines(layout: dict[str, Any], count: int, *, below: bool = False) -> None:
    """Adds the legend, where there is more than one line; below the axis where marks are named above."""
    layout["showlegend"] = count > 1
    layout["legend"] = {"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0}
    if count > 1 and below:
        layout["legend"] |= {"y": -0.34, "yanchor": "top"}
        layout["margin"]["b"] = 88
    elif count > 1:
        layout["margin"]["t"] = 30  # else it lies on the lines
