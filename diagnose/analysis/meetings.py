"""Where the ranks wait for each other's gradients, step by step.

Legend: S is a step that all ranks made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.parallel import Meetings
from diagnose.store.reader import RankLog

Vector = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

MIN_STEPS = 20
"""Fewer steps do not tell a rank that is late from one that was."""

CALM = 0.25
"""A machine that is busy with something else is so in fewer steps than all but these."""

STRETCHES = 10
MIN_STRETCH = 10
"""So many stretches of a run are looked at one by one, of so many steps at least. In each of them a rank
that is always slower comes last most often; one that a busy machine slows down now and then does not."""

PAIR_CHANCE = 0.4
"""By so many standard deviations of their difference each of two ranks that are alike holds the other one
up, over all steps: `1 / sqrt(2 pi)`, the mean of the positive part of a normal deviate. With heavier tails,
as on a busy machine, it is more: then too little is taken for chance."""

QUARTILES_TO_SIGMA = 1.349
"""Standard deviations between the quartiles of a normal distribution. Quartiles, as a rank that is late in
bursts is no noise."""

END = COLUMNS.index("end_ns")


def waits_of(log: RankLog, warmup: int) -> Vector:
    """Returns how long each measured step waited for the gradients of other ranks, in nanoseconds.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
    """
    return waits_in(log.steps[min(warmup, len(log.steps)) :], log.meetings)


def waits_in(rows: Rows, meetings: Rows) -> Vector:
    """Returns how long each of some steps waited for the gradients of other ranks, in nanoseconds.

    Args:
        rows: The steps, in order; some may be missing, as those that a deep window slowed down.
        meetings: As in `RankLog`; what lies outside of the steps is left out.
    """
    waits_S = np.zeros(len(rows))
    if not len(rows) or not len(meetings):
        return waits_S
    begun_S = rows[:, END] - rows[:, len(COUNTS) :].sum(axis=1)
    arrived, met = meetings[:, 0], meetings[:, 1]
    step = np.searchsorted(rows[:, END], arrived)
    inside = step < len(rows)
    inside[inside] = arrived[inside] >= begun_S[step[inside]]
    np.add.at(waits_S, step[inside], (met - arrived)[inside])
    return waits_S


@dataclass(slots=True)
class Waits:
    """What the ranks wait for each other in the same steps. A rank is known by its place.

    Attributes:
        least_S: What the rank waits that waits least: the last to come.
        second_S: The next one; infinite with one rank.
        last_S: Which rank that is.
        mean: What each rank waits, by its place: the mean over all of its own steps.
        change: By how much what it does itself differs from step to step, by its place: nanoseconds between
            the quartiles; of no rank whose own time was not told.
    """

    least_S: Vector
    second_S: Vector
    last_S: npt.NDArray[np.int32]
    mean: dict[int, float]
    change: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rank: int, waits_S: Vector, own_S: Vector | None = None) -> Waits:
        """Begins with one rank.

        Args:
            rank: Its place.
            waits_S: What it waits in each step.
            own_S: What it does itself in each, if that is to be compared.
        """
        return cls(
            least_S=waits_S.copy(),
            second_S=np.full(len(waits_S), np.inf),
            last_S=np.full(len(waits_S), rank, dtype=np.int32),
            mean={rank: float(waits_S.mean()) if len(waits_S) else 0.0},
            change={} if own_S is None else {rank: _between_quartiles(np.diff(own_S))},
        )

    def cut(self, steps: int) -> None:
        """Leaves out what comes after so many steps."""
        self.least_S, self.second_S = self.least_S[:steps], self.second_S[:steps]
        self.last_S = self.last_S[:steps]

    def fold(self, other: Waits) -> None:
        """Takes other ranks in, of as many steps; they may stand before or after its own."""
        later_S = other.least_S < self.least_S
        higher_S = np.where(later_S, self.least_S, other.least_S)
        self.second_S = np.minimum(np.minimum(self.second_S, other.second_S), higher_S)
        self.last_S = np.where(later_S, other.last_S, self.last_S)
        self.least_S = np.minimum(self.least_S, other.least_S)
        self.mean |= other.mean
        self.change |= other.change

    @property
    def met_S(self) -> npt.NDArray[np.bool_]:
        """In which steps all of them met; in the others some only added their gradients up."""
        met: npt.NDArray[np.bool_] = self.least_S > 0
        return met

    def held_ns(self, part_S: npt.NDArray[np.int64], num_parts: int) -> Vector:
        """Returns the nanoseconds by which steps would have been shorter if a rank had come with the last
        but one, summed over the steps of each part; shape `(highest place + 1, num_parts)`.

        Args:
            part_S: Which part each step belongs to.
            num_parts: How many parts there are.
        """
        met_S = self.met_S
        size = max(self.mean) + 1
        which = self.last_S[met_S].astype(np.int64) * num_parts + part_S[met_S]
        late_S = (self.second_S - self.least_S)[met_S]
        held: Vector = np.bincount(which, weights=late_S, minlength=size * num_parts).astype(float)
        return held.reshape(size, num_parts)

    def meetings(self, ranks: dict[int, int]) -> Meetings | None:
        """Returns what the waits tell; `None` with one rank, or where not all of them wait.

        Args:
            ranks: The number of each rank by its place. Two processes of one rank are no two ranks.
        """
        if len(self.mean) < 2 or len(set(ranks.values())) < len(self.mean):
            return None
        met_S = self.met_S
        steps, met = len(met_S), int(met_S.sum())
        if met < MIN_STEPS:
            return None
        places = sorted(self.mean)
        size = max(places) + 1
        last = np.bincount(self.last_S[met_S], minlength=size) / met
        held_ns = self.held_ns(np.zeros(steps, dtype=np.int64), 1)[:, 0] / steps
        least_S = self.least_S[met_S]
        return Meetings(
            num_steps=met,
            wait_ns={ranks[place]: self.mean[place] for place in places},
            common_ns=float(least_S.sum()) / steps,
            calm_ns=float(np.quantile(least_S, CALM)) * met / steps,
            last_share={ranks[place]: float(last[place]) for place in places},
            held_ns={ranks[place]: float(held_ns[place]) for place in places},
            chance_ns=self._chance_ns(int(last.argmax())) * met / steps,
            lead_share=self._lead_share(ranks) if met >= STRETCHES * MIN_STRETCH else {},
        )

    def _chance_ns(self, often: int) -> float:
        """Returns by how many nanoseconds a rank would hold the others up if all were alike, over the steps
        in which they meet.

        It is told by how much varies what the rank that is last most often is late by. Where that varies
        for a reason of its own, as the length of its batches, it is no more than what varies in another.

        Args:
            often: The place of the rank that is last most often.
        """
        met_S = self.met_S
        late_S = (self.second_S - self.least_S)[met_S]
        width_ns = _between_quartiles(np.where(self.last_S[met_S] == often, late_S, -late_S))
        others = [ns for place, ns in self.change.items() if place != often]
        if others:
            width_ns = min(width_ns, median(others))
        # Of two, each comes last in half of the steps; of more, in the fewer the more there are.
        return 2 / len(self.mean) * PAIR_CHANCE * width_ns / QUARTILES_TO_SIGMA

    def _lead_share(self, ranks: dict[int, int]) -> dict[int, float]:
        last = self.last_S[self.met_S]
        size = max(self.mean) + 1
        which = [np.bincount(part, minlength=size).argmax() for part in np.array_split(last, STRETCHES)]
        leads = np.bincount(which, minlength=size) / STRETCHES
        return {ranks[place]: float(leads[place]) for place in self.mean}


def _between_quartiles(values: Vector) -> float:
    """Returns how far apart the quartiles are; 0 of nothing."""
    if not len(values):
        return 0.0
    low, high = np.quantile(values, (0.25, 0.75))
    return float(high - low)
