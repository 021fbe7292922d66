"""What a chart shows, whoever draws it: SVG in the report's file, plotly in the dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from diagnose.core.phases import Phase
from diagnose.core.units import format_ms

Vector = npt.NDArray[np.float64]

USUAL_QUANTILE, HEADROOM, OUTLIER = 0.97, 1.3, 1.6
"""An axis ends a little above all but the highest 3 % of the bins, where the highest would stand out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Something that happened at a step: a fix went into force, a trial began.

    Attributes:
        step: The step, counted from 0.
        label: What happened, in a few words.
        strong: Whether it changed the run to its end, such as a fix that was kept.
        kind: The event that it is of, such as `trial` or `command`.
    """

    step: int
    label: str
    strong: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBins:
    """The steps that a chart is over, in bins that follow each other without gaps.

    Attributes:
        first: First step of the first bin, counted from 0.
        width: Steps per bin.
        marks: What happened on the way.
        end: The step after the last; `None` where the last bin is full.
    """

    first: int = 0
    width: int = 1
    marks: tuple[Mark, ...] = ()
    end: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseAreas:
    """Time per step of each phase over the steps, stacked to the step time.

    Attributes:
        title: What the chart shows, for readers who cannot see it.
        steps: The steps that it is over.
        phase_ms: Mean milliseconds per step of each phase in each bin, in the order they are stacked.
    """

    title: str
    steps: StepBins
    phase_ms: Mapping[Phase, Vector]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One quantity over the steps.

    Attributes:
        title: What the chart shows.
        unit: Unit of `values`, as the axis names it.
        steps: The steps that it is over.
        values: One value per bin; NaN where it was not measured.
    """

    title: str
    unit: str
    steps: StepBins
    values: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLines:
    """Quantities of one unit over the steps, or one of them in parts that have names.

    Attributes:
        title: What the chart shows.
        unit: Unit of the values, as the axis names it.
        steps: The steps that it is over.
        lines: Each line's name and values, one per bin; NaN where it has none.
        logarithmic: Whether the axis is: of what falls by powers of ten. All values are then above 0.
    """

    title: str
    unit: str
    steps: StepBins
    lines: Mapping[str, Vector]
    logarithmic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLines:
    """Quantities of one unit over the run's clock.

    Attributes:
        title: What the chart shows.
        unit: Unit of the values, as the axis names it.
        seconds: Since the run's first step, ascending.
        lines: Each quantity's name and values; NaN where it was not measured.
    """

    title: str
    unit: str
    seconds: Vector
    lines: Mapping[str, Vector]


class Bar(NamedTuple):
    """One bar of a waterfall: where it begins and how long it is, in nanoseconds; `whole`, `better` or
    `worse`; and its figure."""

    name: str
    start_ns: float
    length_ns: float
    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """How the mean step went from one length to another, phase by phase.

    Attributes:
        title: What the chart shows.
        before_ns: Mean nanoseconds per step of each phase before.
        after_ns: Likewise after.
        names: What the two ends are called.
    """

    title: str
    before_ns: Mapping[Phase, float]
    after_ns: Mapping[Phase, float]
    names: tuple[str, str] = ("before", "after")

    @property
    def bars(self) -> list[Bar]:
        """Both steps, and between them the change of each phase that took time in either, in a step's
        order: each begins where the one before ends."""
        level_ns = sum(self.before_ns.values())
        bars = [Bar(self.names[0], 0.0, level_ns, "whole", format_ms(level_ns))]
        for phase in Phase:
            before_ns, after_ns = self.before_ns.get(phase, 0.0), self.after_ns.get(phase, 0.0)
            if before_ns or after_ns:
                change_ns = after_ns - before_ns
                kind = "better" if change_ns < 0 else "worse"
                low_ns = min(level_ns, level_ns + change_ns)
                bars.append(Bar(phase.label, low_ns, abs(change_ns), kind, signed_ms(change_ns)))
                level_ns += change_ns
        end_ns = sum(self.after_ns.values())
        return [*bars, Bar(self.names[1], 0.0, end_ns, "whole", format_ms(end_ns))]


@dataclass(frozen=True, slots=True, kw_only=True)
class GainRow:
    """One speedup, expected and measured.

    Attributes:
        label: What was changed.
        outcome: What became of it, in words.
        predicted: Expected speedup, 1 is no change.
        speedup: Measured speedup.
        interval: The interval that holds the true value.
        kept: Whether it stayed in force.
    """

    label: str
    outcome: str
    predicted: float | None = None
    speedup: float | None = None
    interval: tuple[float, float] | None = None
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gains:
    """Speedups below each other: a dot with its interval, and a hollow one for what was expected."""

    title: str
    rows: tuple[GainRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """One value for each rank and bin of steps, as shades of one colour.

    Attributes:
        title: What the chart shows.
        steps: The steps that it is over.
        ranks: Number of each row's rank; of a row for several, the first one's.
        values_ms: Milliseconds per step, a row per rank; NaN where the rank recorded nothing.
        labels: What the rows are called; empty for `rank 3`.
    """

    title: str
    steps: StepBins
    ranks: Sequence[int]
    values_ms: Vector
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """One quantity over commits.

    Attributes:
        title: What the chart shows.
        unit: Unit of the values.
        labels: What each value is of, oldest first: a commit's short hash.
        values: One per label.
        singles: The measurements that each value is the median of.
        changes: Indices at which a new level begins.
    """

    title: str
    unit: str
    labels: Sequence[str]
    values: Sequence[float]
    singles: Sequence[Sequence[float]]
    changes: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """A point under a roofline.

    Attributes:
        label: What it is the rate of.
        flops_per_byte: Its arithmetic intensity.
        flops_per_s: What it reaches.
    """

    label: str
    flops_per_byte: float
    flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Rates of arithmetic below the device's limits, both axes logarithmic.

    Attributes:
        title: What the chart shows.
        bytes_per_s: What its memory reaches.
        flops_per_s: What its arithmetic reaches.
        points: What is compared with it.
    """

    title: str
    bytes_per_s: float
    flops_per_s: float
    points: tuple[Roof, ...]


Chart = PhaseAreas | StepLine | StepLines | TimeLines | Waterfall | Gains | RankMap | Levels | Roofline


def signed_ms(change_ns: float) -> str:
    """Returns `+1.2 ms`, or `-1.2 ms`, or `0 ms`."""
    if not change_ns:
        return "0 ms"
    return f"{'+' if change_ns > 0 else '-'}{format_ms(abs(change_ns))}"


def cut_above(heights: Vector) -> float | None:
    """Returns where an axis from 0 is cut off, above nearly all bins, as a few, such as the first step's,
    would flatten the rest; `None` where none would."""
    known = heights[np.isfinite(heights)] if np.ndim(heights) else np.zeros(0)
    if not len(known):
        return None
    usual, highest = HEADROOM * float(np.quantile(known, USUAL_QUANTILE)), float(known.max())
    return usual if highest > OUTLIER * usual > 0 else None
