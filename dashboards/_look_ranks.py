"""Maps of ranks: one row each, or where there are more than a screen has room for one row for several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from diagnose.dashboards._snapshot import Lateness, RankBins, Vector

from diagnose.report._charts import RankMap, StepBins

MAX_ROWS = 64
"""More rows a reader cannot tell apart, and a browser takes long to draw."""

MAX_LATEST = 16
"""So many ranks are shown by themselves, the latest first, where most are drawn together."""

MAX_CELLS = 2_048
"""So many values are up to 18 KB of what may be sent at a time; with 64 rows a column is as wide as two are
high."""

FEW_CELLS = MAX_CELLS // 2
"""Where a map is one of three."""

PARTS = 16
"""Ranges to choose from, where there are more ranks than rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Some of the ranks, by their rows.

    Attributes:
        first: The first row.
        last: The one after the last.
    """

    first: int
    last: int

    @property
    def together(self) -> int:
        """How many ranks one row stands for."""
        return -(-(self.last - self.first) // MAX_ROWS)

    def parts(self) -> list[Range]:
        """Returns what it can be narrowed down to; nothing where every rank has its row."""
        if self.together == 1:
            return []
        step = max(MAX_ROWS, -(-(self.last - self.first) // PARTS))
        return [
            Range(first=first, last=min(first + step, self.last))
            for first in range(self.first, self.last, step)
        ]

    def named(self, ranks: Sequence[int]) -> str:
        """Returns it as the address has it: the first rank and the last."""
        return f"{ranks[self.first]}-{ranks[self.last - 1]}"


def range_of(query: Mapping[str, str], ranks: Sequence[int]) -> Range:
    """Returns the ranks that the address asks for; all of them where it does not say."""
    first, _, last = str(query.get("ranks", "")).partition("-")
    numbers = [int(text[:9]) for text in (first, last) if text.isascii() and text.isdigit()]
    if len(numbers) == 2:
        rows = [row for row, rank in enumerate(ranks) if numbers[0] <= rank <= numbers[1]]
        if rows:
            return Range(first=rows[0], last=rows[-1] + 1)
    return Range(first=0, last=len(ranks))


def latest_rows(late: Lateness, late_ns: Mapping[int, float]) -> list[int]:
    """Returns the rows of the latest ranks, the latest first.

    Args:
        late: The map.
        late_ns: What the analysis says of each rank; empty before there was one.
    """
    with np.errstate(invalid="ignore"):
        drawn = np.nan_to_num(late.late.values_ms).mean(axis=1)
    by_row = [late_ns.get(rank, float(ms)) for rank, ms in zip(late.ranks, drawn, strict=True)]
    return sorted(range(len(by_row)), key=lambda row: -by_row[row])[:MAX_LATEST]


def chosen_map(late: Lateness, rows: Sequence[int]) -> RankMap:
    """Shows how late some ranks are, in this order."""
    ranks = [late.ranks[row] for row in rows]
    title = "Lateness of the latest ranks over the steps, in milliseconds"
    return _fitted(late.late, late.late.values_ms[list(rows)], ranks, (), title, FEW_CELLS)


def map_of(
    late: Lateness, bins: RankBins, shown: Range, title: str, *, highest: bool, max_cells: int = MAX_CELLS
) -> RankMap:
    """Shows a range of ranks; of several in one row the highest value, or the lowest.

    Args:
        late: Whose ranks they are.
        bins: The figure that is shown.
        shown: The range.
        title: What it is.
        highest: Whether the highest of several counts: what stands out must not drown in a mean.
        max_cells: How many values it may show.
    """
    values = bins.values_ms[shown.first : shown.last]
    ranks = late.ranks[shown.first : shown.last]
    together = shown.together
    labels: tuple[str, ...] = ()
    if together > 1:
        begins = range(0, len(ranks), together)
        labels = tuple(f"{ranks[at]}-{ranks[min(at + together, len(ranks)) - 1]}" for at in begins)
        most = np.fmax if highest else np.fmin  # which pass over NaN
        values = most.reduceat(values, begins)
        ranks = tuple(ranks[at] for at in begins)
    return _fitted(bins, values, ranks, labels, title, max_cells)


def _fitted(
    bins: RankBins,
    values: Vector,
    ranks: Sequence[int],
    labels: tuple[str, ...],
    title: str,
    max_cells: int,
) -> RankMap:
    width = bins.width
    while values.size > max_cells and values.shape[1] > 1:
        values, width = _halved(values), 2 * width
    steps = StepBins(first=bins.first, width=width)
    return RankMap(title=title, steps=steps, ranks=ranks, values_ms=values, labels=labels)


def _halved(values: Vector) -> Vector:
    """Returns means of two bins each; NaN where neither was read."""
    ranks, bins = values.shape
    pairs = np.full((ranks, bins + bins % 2), np.nan)
    pairs[:, :bins] = values
    pairs = pairs.reshape(ranks, -1, 2)
    known = np.isfinite(pairs)
    counts = known.sum(axis=2)
    sums = np.where(known, pairs, 0.0).sum(axis=2)
    return np.divide(sums, counts, out=np.full(counts.shape, np.nan), where=counts > 0)
