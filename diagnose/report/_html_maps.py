"""The map of ranks and the roofline as inline SVG."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.core.units import NS_PER_MS, format_duration
from diagnose.report._charts import RankMap, Roofline
from diagnose.report._colors import SHADES
from diagnose.report._html_axes import BOX, Across, Scale, escape, frame

NUM_SHADES = 8
"""More a reader cannot tell apart; neighbours of one shade are drawn as one."""

MAX_ROW_LABELS = 16
ROW_REM, LEAST_REM, MOST_REM = 1.3, 3.0, 26.0
ROOM = 4.0
"""The axes of a roofline go so many times beyond the outermost point or corner."""


def rank_map(chart: RankMap) -> str:
    """Shades each rank's row, with what the shades mean below."""
    rows, columns = chart.values_ms.shape
    if not rows or not columns:
        return ""
    known = np.isfinite(chart.values_ms)
    highest = float(chart.values_ms[known].max()) if known.any() else 0.0
    levels = np.full(chart.values_ms.shape, -1)
    if highest > 0:
        parts = np.clip(chart.values_ms[known], 0, None) / highest
        levels[known] = np.minimum((parts * NUM_SHADES).astype(int), NUM_SHADES - 1)
    else:
        levels[known] = 0
    paths = [
        f'<path fill="{_shade(level)}" d="{cells}"/>'
        for level in range(NUM_SHADES)
        if (cells := _cells(levels == level))
    ]
    names = list(chart.labels) or [f"rank {rank}" for rank in chart.ranks]
    every = -(-rows // MAX_ROW_LABELS)
    tall = min(MOST_REM, max(LEAST_REM, ROW_REM * rows))
    plot = frame(
        chart.title,
        "",
        paths,
        up=[(1 - (row + 0.5) / rows, names[row]) for row in range(0, rows, every)],
        across=Across.of(chart.steps, columns),
        height_rem=tall,
    )
    swatches = "".join(
        f'<span class="swatch" style="background:{_shade(level)}"></span>' for level in range(NUM_SHADES)
    )
    scale = f"<li>0 ms <span>{swatches}</span> {format_duration(highest * NS_PER_MS)}</li>"
    return f'<figure class="chart map">{plot}<ul class="legend shades">{scale}</ul></figure>\n'


def _cells(chosen: npt.NDArray[np.bool_]) -> str:
    """Returns the path around cells of one shade, neighbours in a row as one."""
    rows, columns = chosen.shape
    path = []
    for row in range(rows):
        top, bottom = round(BOX * row / rows), round(BOX * (row + 1) / rows)
        edges = np.flatnonzero(np.diff(np.concatenate([[False], chosen[row], [False]]).astype(int)))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            left, right = round(BOX * first / columns), round(BOX * last / columns)
            path.append(f"M{left} {top}H{right}V{bottom}H{left}Z")
    return "".join(path)


def _shade(level: int) -> str:
    """Returns the colour of a level, between those of the scale."""
    at = level / (NUM_SHADES - 1) * (len(SHADES) - 1)
    low = min(int(at), len(SHADES) - 2)
    mixed = [
        round(int(one, 16) + (at - low) * (int(other, 16) - int(one, 16)))
        for one, other in zip(_channels(SHADES[low]), _channels(SHADES[low + 1]), strict=True)
    ]
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(color: str) -> list[str]:
    return [color[index : index + 2] for index in (1, 3, 5)]


def roofline(chart: Roofline) -> str:
    """Draws the roof, slanted where memory is the limit and flat where arithmetic is, and the points."""
    corner = chart.flops_per_s / chart.bytes_per_s
    intensities = [corner, *(point.flops_per_byte for point in chart.points)]
    across = Scale(low=min(intensities) / ROOM, high=max(intensities) * ROOM, logarithmic=True)
    left = across.low * chart.bytes_per_s
    rates = [left, chart.flops_per_s, *(point.flops_per_s for point in chart.points)]
    up = Scale(low=min(rates) / 2, high=max(rates) * 2, logarithmic=True)
    roof = [(across.low, left), (corner, chart.flops_per_s), (across.high, chart.flops_per_s)]
    path = "L".join(f"{round(BOX * across.at(x))} {round(BOX * (1 - up.at(y)))}" for x, y in roof)
    dots = []
    ordered = sorted(chart.points, key=lambda point: point.flops_per_byte)
    for number, point in enumerate(ordered):
        x, y = 100 * across.at(point.flops_per_byte), 100 * up.at(point.flops_per_s)
        side = " above" if number % 2 else ""  # neighbours' names do not run into each other
        dots.append(
            f'<span class="dot{side}" style="left:{x:.2f}%;bottom:{y:.2f}%">'
            f"<b>{escape(point.label)}</b></span>"
        )
    plot = frame(
        chart.title,
        "FLOP/s over FLOP per byte",
        [f'<path class="line roof" d="M{path}"/>'],
        up=up,
        across=Across(labels=across.named(), lines=True),
        beside=dots,
    )
    return f'<figure class="chart roofline">{plot}</figure>\n'
