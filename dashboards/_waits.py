"""What the ranks wait for each other in the same steps, read behind the newest of them.

Who is late is told by comparing what all ranks wait in one step. So steps are compared in order, once all
ranks have told of them, and let go.

Legend: S is a step, R a rank, B a bin.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diagnose.analysis.meetings import END, Vector, Waits, waits_in
from diagnose.core.ledger import COLUMNS
from diagnose.store.reader import BAD_ROW
from diagnose.store.tail import Chunk, Look

MAX_RANK_BINS = 128
"""Columns of the map of ranks: with 64 ranks more would neither be seen nor sent in time."""

NEWEST_STEPS = 512
"""Steps of which it is told who is late now."""


PIECE = 100
"""Records read at a time: a merged one holds 500 steps, and a piece should take some ten milliseconds."""

Rows = npt.NDArray[np.int64]


class RankWaits:
    """One rank's waits for gradients, read in order.

    Args:
        any: See there.

    Attributes:
        any: Whether any backward pass was seen to wait.
        next_step: The first step that has not been read.
        waits_S: Of the steps before it, those that have not been taken.
    """

    def __init__(self, *, any: bool = False) -> None:
        self.any = any
        self.next_step = 0
        self.waits_S: Vector = np.zeros(0)
        self._next_pass = 0
        self._unclaimed: Rows = np.empty((0, 2), dtype=np.int64)

    def look_for(self, file: Look) -> None:
        """Looks whether this rank waits for others at all."""
        self.any = self.any or bool(file.meetings_from(0, 1))

    def read(self, file: Look) -> bool:
        """Reads a piece of what is new; says whether there was anything. A damaged step waited for nobody,
        as far as is known."""
        # Steps first: a flush adds them and their passes at once, and it may come between the two.
        chunks = file.chunks_from(file.begin_of(self.next_step), PIECE)
        passes = file.meetings_from(self._next_pass, PIECE)
        self._unclaimed = np.concatenate([self._unclaimed, *passes])
        self._next_pass += sum(map(len, passes))
        more = len(passes) == PIECE  # then steps behind the last one may have passes to come
        known_ns = int(self._unclaimed[-1, 0]) if more else None
        before = self.next_step
        told = [self.waits_S]
        for lost, rows in self._runs(chunks, known_ns):
            told += [np.zeros(lost), waits_in(rows, self._unclaimed)]
            if len(rows):
                self._unclaimed = self._unclaimed[self._unclaimed[:, 0] > rows[-1, END]]
        self.waits_S = np.concatenate(told)
        return self.next_step > before or bool(passes)

    def _runs(self, chunks: Sequence[Chunk], known_ns: int | None) -> list[tuple[int, Rows]]:
        """Returns steps that follow each other, and before them how many are missing."""
        runs: list[tuple[int, list[Rows]]] = [(0, [])]
        for chunk in chunks:
            if known_ns is not None and chunk.totals[0] > known_ns:
                break
            end = chunk.first + chunk.num_steps
            if end <= self.next_step:
                continue
            try:
                rows = chunk.rows()[max(0, self.next_step - chunk.first) :]
            except BAD_ROW:
                rows = np.empty((0, len(COLUMNS)), dtype=np.int64)
            lost = end - self.next_step - len(rows)
            if lost:
                runs.append((lost, []))
            runs[-1][1].append(rows)
            self.next_step = end
        none = np.empty((0, len(COLUMNS)), dtype=np.int64)
        return [(lost, np.concatenate([none, *rows])) for lost, rows in runs]

    def take(self, count: int) -> Vector:
        """Returns the first steps that have not been taken, which then have."""
        taken, self.waits_S = self.waits_S[:count], self.waits_S[count:]
        return taken


class LateBins:
    """Who came last, and by how much, in bins over the steps that all ranks have told of.

    Args:
        num_ranks: How many there are. A rank is known by its place.

    Attributes:
        width: Steps per bin, a power of two; the first bin begins at step 0.
        num_steps: Steps compared.
        num_met: Those of them in which all ranks waited.
        held_ns: Nanoseconds that each rank held the others up, summed over the bin; shape `(R, B)`.
    """

    def __init__(self, num_ranks: int) -> None:
        self.width = 1
        self.num_steps = 0
        self.num_met = 0
        self.held_ns = np.zeros((num_ranks, MAX_RANK_BINS))
        self._last_S = np.zeros(0, dtype=np.int32)
        self._late_S: Vector = np.zeros(0)

    def compare(self, ranks: Sequence[RankWaits]) -> bool:
        """Takes the steps that all ranks have told of; says whether there were any."""
        count = min(len(rank.waits_S) for rank in ranks)
        if not count:
            return False
        waits = Waits.of(0, ranks[0].take(count))
        for place, rank in enumerate(ranks[1:], start=1):
            waits.fold(Waits.of(place, rank.take(count)))
        while self.num_steps + count > MAX_RANK_BINS * self.width:
            pairs = self.held_ns.reshape(len(ranks), -1, 2).sum(axis=2)
            self.held_ns = np.concatenate([pairs, np.zeros_like(pairs)], axis=1)
            self.width *= 2
        part_S = (self.num_steps + np.arange(count)) // self.width
        self.held_ns += waits.held_ns(part_S, MAX_RANK_BINS)
        self.num_steps += count
        met_S = waits.met_S
        self.num_met += int(met_S.sum())
        late_S = np.where(met_S, waits.second_S - waits.least_S, 0.0)
        self._last_S = np.concatenate([self._last_S, waits.last_S])[-NEWEST_STEPS:]
        self._late_S = np.concatenate([self._late_S, late_S])[-NEWEST_STEPS:]
        return True

    def per_step_ns(self) -> Vector:
        """Returns by how much each rank held the others up per step of a bin, of bins with steps."""
        begins = np.arange(0, self.num_steps, self.width)
        steps_B = np.minimum(self.width, self.num_steps - begins)
        return self.held_ns[:, : len(begins)] / steps_B

    def newest_ns(self) -> npt.NDArray[np.float64]:
        """Returns likewise per step of the newest ones compared; shape `(R,)`."""
        held = np.bincount(self._last_S, weights=self._late_S, minlength=len(self.held_ns))
        return held / max(1, len(self._last_S))
