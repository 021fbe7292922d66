"""The roofline as a plotly figure."""

from __future__ import annotations

from typing import Any

from diagnose.report._charts import Roofline
from diagnose.report._plotly_axes import NEUTRAL, axes, escaped

POINT = "#e06a2f"
MARGIN = 4.0
"""The axes go so many times beyond the outermost point or corner."""


def roofline(chart: Roofline) -> dict[str, Any]:
    """Draws the roof, slanted where memory is the limit and flat where arithmetic is, and the points."""
    corner = chart.flops_per_s / chart.bytes_per_s
    places = [point.flops_per_byte for point in chart.points]
    low, high = min([corner, *places]) / MARGIN, max([corner, *places]) * MARGIN
    roof = {
        "type": "scatter",
        "mode": "lines",
        "name": "measured limit",
        "x": [low, corner, high],
        "y": [low * chart.bytes_per_s, chart.flops_per_s, chart.flops_per_s],
        "line": {"color": NEUTRAL, "width": 2},
        "hovertemplate": "%{y:,.3s}FLOP/s<extra>limit</extra>",
    }
    points = {
        "type": "scatter",
        "mode": "markers+text",
        "x": places,
        "y": [point.flops_per_s for point in chart.points],
        "text": [escaped(point.label) for point in chart.points],
        "textposition": "bottom center",
        "marker": {"color": POINT, "size": 10},
        "cliponaxis": False,
        "hovertemplate": "%{text}: %{y:,.3s}FLOP/s at %{x:,.3~g} FLOP per byte<extra></extra>",
    }
    layout = axes("FLOP/s")
    layout["xaxis"] |= {"type": "log", "title": {"text": "FLOP per byte"}, "dtick": 1}
    layout["yaxis"] |= {"type": "log", "rangemode": "normal", "tickformat": "~s", "dtick": 1}
    layout["height"] = 320
    return {"data": [roof, points], "layout": layout}
