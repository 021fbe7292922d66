"""What plotly figures have in common: axes, marks across them, foreign text and packed numbers."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from diagnose.core.units import format_rate
from diagnose.report._charts import StepBins, Vector, cut_above
from diagnose.report._wording import printable

NEUTRAL = "#8a929e"  # stands out from both pages
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
MAX_LABELLED_MARKS = 12
"""More labels than this run into each other; the lines stay."""


def escaped(text: str) -> str:
    """Returns foreign text as plotly shows it letter for letter."""
    return printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def packed(values: Vector) -> dict[str, Any]:
    """Returns an array as plotly.js reads it without parsing: four bytes a value, NaN for a gap."""
    array = np.ascontiguousarray(values, dtype="<f4")
    shape = {"shape": ", ".join(map(str, array.shape))} if array.ndim > 1 else {}
    return {"dtype": "f4", "bdata": base64.b64encode(array.tobytes()).decode("ascii"), **shape}


def axes(unit: str) -> dict[str, Any]:
    """Returns the layout of every chart."""
    return {
        "uirevision": "keep",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": NEUTRAL},
        "margin": {"l": 52, "r": 12, "t": 12, "b": 40},
        "showlegend": False,
        "hoverlabel": {"font": {"family": FONT, "size": 12}, "namelength": -1},
        "xaxis": {"zeroline": False, "automargin": True, "fixedrange": False},
        "yaxis": {
            "title": {"text": unit},
            "rangemode": "tozero",
            "zeroline": False,
            "automargin": True,
            "fixedrange": True,
            "nticks": 6,
        },
    }


def step_axes(unit: str, steps: StepBins, num_bins: int) -> dict[str, Any]:
    """Returns the layout of a chart over steps, with what happened as lines across it.

    A name stands on the side of its line that has more room: where one does not fit, plotly makes the axis
    longer.
    """
    layout, marks = axes(unit), steps.marks
    middle = steps.first + steps.width * num_bins / 2
    layout["xaxis"] |= {"title": {"text": "step"}, "tickformat": ",d", "showgrid": False}
    layout["hovermode"] = "x unified"
    layout["shapes"] = [
        *_lines([mark.step + 1 for mark in marks if not mark.strong], dash="dot", width=1),
        *_lines([mark.step + 1 for mark in marks if mark.strong], dash="solid", width=2),
    ]
    labelled = [mark for mark in marks if mark.strong][:MAX_LABELLED_MARKS]
    layout["annotations"] = [
        {
            "x": mark.step + 1,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "xanchor": "left" if mark.step <= middle else "right",
            "yshift": 13 * (index % 2),
            "text": escaped(mark.label),
            "showarrow": False,
            "font": {"size": 11},
        }
        for index, mark in enumerate(labelled)
    ]
    if labelled:
        layout["margin"]["t"] = 34
    return layout


def _lines(steps: Sequence[int], *, dash: str, width: int) -> list[dict[str, Any]]:
    """Returns lines across the chart as one path: a hundred shapes are half of what a tick may send."""
    if not steps:
        return []
    path = "".join(f"M{step},0V1" for step in steps)
    line = {"color": NEUTRAL, "width": width, "dash": dash}
    return [{"type": "path", "path": path, "yref": "paper", "line": line}]


def vertical_line(at: float, *, dash: str, width: int = 1) -> dict[str, Any]:
    """Returns a line across the chart."""
    line = {"color": NEUTRAL, "width": width, "dash": dash}
    return {"type": "line", "x0": at, "x1": at, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def cut_off(layout: dict[str, Any], heights: Vector, unit: str) -> None:
    """Cuts the axis off above nearly all bins where a few, as the first step's, would flatten the rest."""
    usual = cut_above(heights)
    if usual is None:
        return
    highest = float(np.nanmax(heights))
    layout["yaxis"] |= {"range": [0, usual], "rangemode": "normal"}
    layout["annotations"].append(
        {
            "x": 1,
            "y": 1,
            "xref": "paper",
            "yref": "paper",
            "xanchor": "right",
            "yanchor": "top",
            "text": f"cut off; the highest is {format_rate(highest)} {escaped(unit)}",
            "showarrow": False,
            "font": {"size": 11},
        }
    )
