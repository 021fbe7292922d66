"""The ranks' same steps side by side, without all ranks in memory: each is folded in and let go.

Legend: S is a step that all ranks made, N one that became a point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diagnose.analysis.meetings import Waits
from diagnose.core.ledger import COLUMNS
from diagnose.core.phases import Phase

Rows = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]

MAX_POINTS = 1 << 20
"""Steps of all ranks together that are kept one by one, evenly chosen when there are more: a line through a
million points is as sure as one through ten million."""

OFTEN = 0.5
"""A step has what the mean one has if it spends more than this part of that."""

UNITS = ("tokens", "samples")
"""What the size of a batch is counted in, the more telling first."""


@dataclass(slots=True)
class Highest:
    """Of each step, the rank that has most of something.

    Attributes:
        most_S: What it has.
        rank_S: Which rank it is; of several that have as much the first.
    """

    most_S: Vector
    rank_S: npt.NDArray[np.int32]

    def fold(self, other: Highest) -> None:
        """Takes other ranks in, of as many steps; they may stand before or after its own."""
        higher_S = other.most_S > self.most_S
        higher_S |= (other.most_S == self.most_S) & (other.rank_S < self.rank_S)
        np.copyto(self.most_S, other.most_S, where=higher_S)
        np.copyto(self.rank_S, other.rank_S, where=higher_S)

    def cut(self, steps: int) -> None:
        """Leaves out what comes after so many steps."""
        self.most_S, self.rank_S = self.most_S[:steps], self.rank_S[:steps]

    def counts(self, num_ranks: int) -> npt.NDArray[np.intp]:
        """Returns in how many steps each rank has most."""
        return np.bincount(self.rank_S, minlength=num_ranks)


@dataclass(slots=True)
class Sizes:
    """How large the batches of a step are, counted in one unit.

    Attributes:
        fullest: The rank that has the largest.
        least_S: The smallest.
        total_S: Of all ranks together.
    """

    fullest: Highest
    least_S: Vector
    total_S: Vector

    def fold(self, other: Sizes) -> None:
        """Takes the batches of other ranks in, of as many steps."""
        self.fullest.fold(other.fullest)
        np.minimum(self.least_S, other.least_S, out=self.least_S)
        self.total_S += other.total_S

    def cut(self, steps: int) -> None:
        """Leaves out what comes after so many steps."""
        self.fullest.cut(steps)
        self.least_S, self.total_S = self.least_S[:steps], self.total_S[:steps]


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Some steps of one rank, for a line through those of all.

    Attributes:
        step_N: Which steps, from 0 of the measured ones.
        forward_N: Nanoseconds of their forward pass.
        size_N: By unit, the size of their batch.
    """

    step_N: npt.NDArray[np.int64]
    forward_N: Vector
    size_N: dict[str, Vector]


@dataclass(slots=True, kw_only=True)
class Across:
    """What a comparison of the ranks' same steps gives. A rank is known by its place among all ranks.

    Attributes:
        steps: Measured steps that every rank made.
        latest: By phase, the rank that takes longest.
        apart_S: What the rank that spends least in collectives that Python calls spends there.
        waits: What the ranks wait for each other's gradients, where DDP averages them.
        meets: What they spend in all that they do together, the waits included.
        sizes: By unit, how large batches are.
        points: By rank, steps for a line through those of all.
    """

    steps: int
    latest: dict[Phase, Highest]
    apart_S: Vector
    waits: Waits
    meets: Waits
    sizes: dict[str, Sizes]
    points: dict[int, Points]

    @classmethod
    def of(
        cls, rank: int, series: Mapping[Phase, Vector], waits_S: Vector, rows: Rows, stride: int = 1
    ) -> Across:
        """Begins with one rank.

        Args:
            rank: Its place.
            series: Nanoseconds of each phase by step.
            waits_S: What it waits for gradients of other ranks, a part of its communication.
            rows: Its measured steps.
            stride: One of so many steps becomes a point.
        """
        rank_S = np.full(len(rows), rank, dtype=np.int32)

        def highest(times_S: Vector) -> Highest:
            return Highest(times_S.copy(), rank_S.copy())

        zeros_S = np.zeros(len(rows))
        own_S = sum((ns for phase, ns in series.items() if phase is not Phase.COMMUNICATION), zeros_S)
        size_S = {unit: rows[:, COLUMNS.index(unit)].astype(float) for unit in UNITS}
        chosen = slice(None, None, stride)
        return cls(
            steps=len(rows),
            latest={phase: highest(times_S) for phase, times_S in series.items()},
            apart_S=np.maximum(series[Phase.COMMUNICATION] - waits_S, 0.0),
            waits=Waits.of(rank, waits_S, own_S),
            meets=Waits.of(rank, series[Phase.COMMUNICATION], own_S),
            sizes={unit: Sizes(highest(each), each.copy(), each.copy()) for unit, each in size_S.items()},
            points={
                rank: Points(
                    step_N=np.arange(0, len(rows), stride),
                    forward_N=rows[chosen, COLUMNS.index(Phase.FORWARD.value)].astype(float),
                    size_N={unit: each[chosen] for unit, each in size_S.items()},
                )
            },
        )

    def fold(self, other: Across) -> None:
        """Takes other ranks in; `other` is used up. Steps that not all made are left out."""
        self.steps = steps = min(self.steps, other.steps)
        for each in (self, other):
            for latest in each.latest.values():
                latest.cut(steps)
            for sizes in each.sizes.values():
                sizes.cut(steps)
            each.waits.cut(steps)
            each.meets.cut(steps)
            each.apart_S = each.apart_S[:steps]
        for phase, late in other.latest.items():
            self.latest[phase].fold(late)
        self.apart_S = np.minimum(self.apart_S, other.apart_S)
        self.waits.fold(other.waits)
        self.meets.fold(other.meets)
        for unit, sizes in other.sizes.items():
            self.sizes[unit].fold(sizes)
        self.points |= other.points

    def late_shares(self, ranks: Sequence[int]) -> list[dict[Phase, float]]:
        """Returns, for each of these ranks and each phase, the part of the steps in which it took longest.

        Empty with one rank, or without a step that all made.
        """
        if len(ranks) < 2 or not self.steps:
            return [{} for _ in ranks]
        counts = {phase: late.counts(max(ranks) + 1) for phase, late in self.latest.items()}
        return [
            {phase: float(count[rank] / self.steps) for phase, count in counts.items()} for rank in ranks
        ]

    def collective_ns(self, *, exchanges: bool = False) -> float | None:
        """Returns by how much steps would be shorter without the collectives that Python calls: the mean.

        A step ends when the rank has come that does most, so what the rank waits that waits least is what
        all lose. Without these collectives that would be what it waits for gradients. Whoever is late to
        one of them and early to the next makes up for it where all meet but once: so this is more than what
        each rank spends in them that waits for no other.

        Args:
            exchanges: Whether a rank also waits for a single other one. How much of that would be left is
                not known, so only what the rank that spends least in collectives spends there is counted.

        Returns:
            `None` with one rank, or without a step that all made.
        """
        if len(self.points) < 2 or not self.steps:
            return None
        return float(self._collectives_S(exchanges).mean())

    def collective_share(self, *, exchanges: bool = False) -> float | None:
        """Returns the part of the steps that have these collectives: those that spend over half of what the
        mean step does. `None` where `collective_ns` is."""
        mean_ns = self.collective_ns(exchanges=exchanges)
        if mean_ns is None:
            return None
        return float((self._collectives_S(exchanges) > OFTEN * mean_ns).mean())

    def _collectives_S(self, exchanges: bool) -> Vector:
        return self.apart_S if exchanges else np.maximum(self.meets.least_S - self.waits.least_S, 0.0)


def stride_for(steps: int, ranks: int) -> int:
    """Returns which of the steps become points, so that all ranks have `MAX_POINTS` at most."""
    return max(1, -(-steps * ranks // MAX_POINTS))
