"""Areas and lines as inline SVG."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from diagnose.core.units import format_share
from diagnose.report._charts import PhaseAreas, StepLine, StepLines, TimeLines, Vector
from diagnose.report._colors import PHASE_COLORS
from diagnose.report._html_axes import BOX, Across, Scale, escape, frame, y_of

STROKES = 4
"""Kinds of stroke that the style sheet has."""


def areas(chart: PhaseAreas) -> str:
    """Stacks the phases, the first in a step's order at the bottom, with what each has of the whole."""
    drawn = {phase: np.nan_to_num(times) for phase, times in chart.phase_ms.items() if np.nansum(times)}
    if not drawn:
        return ""
    tops = np.cumsum(list(drawn.values()), axis=0)
    scale = Scale.to(tops[-1], "ms", room=1.0)
    # From the highest down, each covers what it does not own: half the numbers of drawing both edges.
    paths = [
        f'<path fill="{PHASE_COLORS[phase]}" d="M0 {BOX}{_stairs(top / scale.high)}V{BOX}Z"/>'
        for phase, top in reversed(list(zip(drawn, tops, strict=True)))
    ]
    whole = float(tops[-1].sum())
    legend = "".join(
        f'<li><span class="swatch" style="background:{PHASE_COLORS[phase]}"></span>'
        f"{phase.label} {format_share(float(times.sum()) / whole)}</li>"
        for phase, times in drawn.items()
    )
    across = Across.of(chart.steps, tops.shape[1])
    plot = frame(chart.title, "ms per step", paths, up=scale, across=across)
    return f'<figure class="chart">{plot}<ul class="legend">{legend}</ul></figure>\n'


def step_line(chart: StepLine) -> str:
    """Draws one line in steps, broken where nothing was measured."""
    scale = Scale.to(chart.values, chart.unit)
    path = "".join(
        f"M{_edge(start, len(chart.values))} {y_of(part[0] / scale.high)}"
        + _stairs(part / scale.high, start, len(chart.values))
        for start, part in _unbroken(chart.values)
    )
    across = Across.of(chart.steps, len(chart.values))
    drawn = [f'<path class="line" d="{path}"/>'] if path else []
    plot = frame(chart.title, chart.unit, drawn, up=scale, across=across)
    return f'<figure class="chart">{plot}</figure>\n'


def step_lines(chart: StepLines) -> str:
    """Draws a few lines over the steps, told apart by colour and by dashes."""
    num_bins = max((len(values) for values in chart.lines.values()), default=0)
    places = (np.arange(num_bins) + 0.5) / max(1, num_bins)
    across = Across.of(chart.steps, num_bins)
    return _told_apart(chart.title, chart.unit, places, chart.lines, across, logarithmic=chart.logarithmic)


def time_lines(chart: TimeLines) -> str:
    """Draws likewise over the run's clock."""
    seconds = chart.seconds
    if not len(seconds):
        return ""
    begin, end = float(seconds[0]), float(seconds[-1])
    places = (seconds - begin) / (end - begin) if end > begin else np.full(len(seconds), 0.5)
    ends = ((0.0, f"{begin:,.0f} s"), (1.0, f"{end:,.0f} s after the first step"))
    across = Across(labels=ends if end > begin else ends[1:])
    return _told_apart(chart.title, chart.unit, places, chart.lines, across)


def _told_apart(
    title: str,
    unit: str,
    places: Vector,
    lines: Mapping[str, Vector],
    across: Across,
    *,
    logarithmic: bool = False,
) -> str:
    drawn = {name: values for name, values in lines.items() if np.isfinite(values).any()}
    if not drawn:
        return ""
    every = np.concatenate(list(drawn.values()))
    scale = Scale.of_powers(every[every > 0]) if logarithmic else Scale.to(every, unit)
    paths = [
        f'<path class="line s{number % STROKES}" d="{_through(places, values, scale)}"/>'
        for number, values in enumerate(drawn.values())
    ]
    plot = frame(title, unit, paths, up=scale, across=across)
    names = "".join(
        f'<li><svg class="stroke" aria-hidden="true"><path class="line s{number % STROKES}" d="M0 6H28"/>'
        f"</svg>{escape(name)}</li>"
        for number, name in enumerate(drawn)
    )
    legend = f'<ul class="legend">{names}</ul>' if len(drawn) > 1 else ""
    return f'<figure class="chart lines">{plot}{legend}</figure>\n'


def _through(places: Vector, values: Vector, scale: Scale) -> str:
    """Returns the path through values at their places, broken where there are none."""
    path = []
    for start, part in _unbroken(values):
        points = [
            f"{round(BOX * at)} {y_of(scale.at(value))}"
            for at, value in zip(places[start : start + len(part)].tolist(), part.tolist(), strict=True)
        ]
        # One alone would be no line: a short one shows it.
        path.append(f"M{points[0]}" + ("L" + "L".join(points[1:]) if len(points) > 1 else "h6"))
    return "".join(path)


def _stairs(heights: Vector, start: int = 0, whole: int | None = None) -> str:
    """Returns the path along the tops of bins of equal width, heights from 0 to 1.

    Args:
        heights: Of bins that follow each other.
        start: The place of the first of them.
        whole: How many bins the chart has; as many as there are heights, if not given.
    """
    whole = whole or len(heights)
    return "".join(
        f"V{y_of(height)}H{_edge(number, whole)}" for number, height in enumerate(heights, start=start + 1)
    )


def _edge(number: int, whole: int) -> int:
    return round(BOX * number / whole)


def _unbroken(values: Vector) -> list[tuple[int, Vector]]:
    """Returns the stretches of values that are known, each with the place of its first."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return []
    runs: list[npt.NDArray[np.intp]] = np.split(known, np.flatnonzero(np.diff(known) > 1) + 1)
    return [(int(run[0]), values[run]) for run in runs]
