"""The frame of a chart as inline SVG: axes, lines across, marks, and what tells the lines apart.

Curves are drawn in a box of 1000 by 1000 that is stretched to the page; what must not be stretched, text
and dots, stands beside it or is placed in percent.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diagnose.core.units import format_rate
from diagnose.report._charts import Mark, StepBins, Vector, cut_above
from diagnose.report._wording import printable

BOX = 1000
TICKS = 4
"""About so many lines across a chart."""
MAX_POWERS = 6
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
CROWDED = 12
"""More marks than this are named in words for those who cannot see them, and nobody reads so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Values to places in the box.

    Attributes:
        low: The value at its beginning.
        high: The value at its end; larger than `low`.
        logarithmic: Whether equal steps are equal factors; both ends are then above 0.
        note: What the reader must know of it, such as that it is cut off.
    """

    low: float = 0.0
    high: float
    logarithmic: bool = False
    note: str = ""

    @classmethod
    def to(cls, values: Vector, unit: str, room: float = 1.05) -> Scale:
        """Returns one from 0 to so many times the highest value, cut off where a few would flatten all
        others."""
        known = values[np.isfinite(values)]
        highest = float(known.max()) if len(known) else 0.0
        limit = cut_above(values)
        if limit is not None:
            return cls(high=limit, note=f"cut off; the highest is {format_rate(highest)} {unit}")
        return cls(high=highest * room if highest > 0 else 1.0)

    @classmethod
    def of_powers(cls, values: Vector) -> Scale:
        """Returns a logarithmic one over positive values, from a power of ten to a power of ten."""
        low, high = math.floor(math.log10(float(values.min()))), math.ceil(math.log10(float(values.max())))
        return cls(low=10.0**low, high=10.0 ** max(high, low + 1), logarithmic=True)

    def at(self, value: float) -> float:
        """Returns the place, 0 to 1; what lies outside is at the edge."""
        if self.logarithmic:
            part = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, part))

    def named(self) -> list[tuple[float, str]]:
        """Returns the places of a few round values, and how these are written."""
        values = self.powers() if self.logarithmic else round_values(self.high)
        return [(self.at(value), _written(value)) for value in values]

    def powers(self) -> list[float]:
        """Returns the powers of ten in it, or every second where they are many, and so on."""
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        every = max(1, -(-(last - first) // MAX_POWERS))
        return [10.0**power for power in range(first, last + 1, every)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Across:
    """What runs along the lower edge.

    Attributes:
        labels: Places, 0 to 1, and what stands there.
        marks: Likewise.
        lines: Whether a line goes up from each label.
    """

    labels: Sequence[tuple[float, str]]
    marks: Sequence[tuple[float, Mark]] = ()
    lines: bool = False

    @classmethod
    def of(cls, steps: StepBins, num_bins: int) -> Across:
        """Returns the axis of some steps, with what happened at them."""
        first, num_steps = steps.first, steps.width * max(1, num_bins)
        placed = [((mark.step - first) / num_steps, mark) for mark in steps.marks]
        last = first + num_steps if steps.end is None else min(steps.end, first + num_steps)
        ends = ((0.0, f"step {first + 1:,}"), (1.0, f"step {last:,}"))
        return cls(
            labels=ends if num_steps > 1 else ends[:1],
            marks=[(at, mark) for at, mark in placed if 0 <= at <= 1],
        )


def frame(
    title: str,
    unit: str,
    paths: Sequence[str],
    *,
    up: Scale | Sequence[tuple[float, str]],
    across: Across,
    beside: Sequence[str] = (),
    height_rem: float | None = None,
) -> str:
    """Draws the axes, what lies between them, and what is marked.

    Args:
        title: What the chart shows.
        unit: Of the values; empty where the labels say it.
        paths: What is drawn, in the box.
        up: The axis upwards; without values the places, 0 to 1, that have a name.
        across: The other one.
        beside: What must not be stretched, placed in percent.
        height_rem: Its height; `None` for the usual one.
    """
    lines, labels, drawn = [], list(beside), []
    for at, text in up.named() if isinstance(up, Scale) else up:
        lines += [f'<path class="grid" d="M0 {y_of(at)}H{BOX}"/>'] if isinstance(up, Scale) else []
        labels.append(f'<span class="y" style="bottom:{100 * at:.2f}%">{escape(text)}</span>')
    for at, mark in across.marks:
        words = f"{mark.label} at step {mark.step + 1:,}"
        drawn.append(
            f'<path class="mark{" strong" if mark.strong else ""}" d="M{round(BOX * at)} 0V{BOX}">'
            f"<title>{escape(words)}</title></path>"
        )
        if mark.strong:
            labels.append(f'<span class="told" style="{_side(at)}">{escape(mark.label)}</span>')
    for at, text in across.labels:
        lines += [f'<path class="grid" d="M{round(BOX * at)} 0V{BOX}"/>'] if across.lines else []
        labels.append(f'<span class="x" style="{_below(at)}">{escape(text)}</span>')
    if isinstance(up, Scale) and up.note:
        labels.append(f'<span class="told low" style="right:0">{escape(up.note)}</span>')
    spoken = [f"{mark.label} at step {mark.step + 1:,}" for _, mark in across.marks]
    if len(spoken) > CROWDED:
        spoken = [*spoken[:CROWDED], f"and {len(spoken) - CROWDED} more"]
    desc = f"<desc>{escape('; '.join(spoken))}</desc>" if spoken else ""
    caption = f"{escape(title)}, {escape(unit)}" if unit else escape(title)
    height = f' style="height:{height_rem:.1f}rem"' if height_rem is not None else ""
    return (
        f'<figcaption>{caption}</figcaption><div class="plot"{height}>'
        f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img"'
        f' aria-label="{escape(title)}">'
        f"{desc}{''.join(lines)}{''.join(paths)}{''.join(drawn)}</svg>{''.join(labels)}</div>"
    )


def y_of(height: float) -> int:
    """Returns where a height, 0 to 1, is in the box."""
    return round(BOX * (1 - min(1.0, max(0.0, float(height)))))


def round_values(highest: float) -> list[float]:
    """Returns a few round values from 0 up to the highest one."""
    if not highest > 0 or not math.isfinite(highest):
        return [0.0]
    rough = highest / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    pace = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough)
    return [pace * number for number in range(int(highest / pace + 1e-9) + 1)]


def escape(text: str) -> str:
    """Returns foreign text as HTML that shows it letter for letter."""
    return html.escape(printable(text))


def _written(value: float) -> str:
    """Returns `0.25`, `1,000`, `40 M`."""
    if value >= 1e6:
        factor, letter = next((factor, letter) for factor, letter in PREFIXES if value >= factor)
        return f"{value / factor:,.4g} {letter}"
    return f"{value:,.6g}"


def _side(at: float) -> str:
    """Begins or ends at its place, on the side that has more room, and takes no more than that."""
    if at > 0.5:
        return f"right:{100 - 100 * at:.2f}%;max-width:{100 * at:.2f}%"
    return f"left:{100 * at:.2f}%;max-width:{100 - 100 * at:.2f}%"


def _below(at: float) -> str:
    """Begins at the left edge, ends at the right one, and stands under its place between them."""
    if at <= 0:
        return "left:0"
    return "right:0" if at >= 1 else f"left:{100 * at:.2f}%;transform:translateX(-50%)"
