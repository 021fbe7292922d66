"""A rank's steps as at most 600 bins, filled in any order: a run of any length takes the same room.

A bin is a power of two of steps wide and begins at a multiple of its width. So an old bin never changes
when the run grows, save that two of them become one; and steps can be added from the newest back to the
oldest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.store.tail import BAD_ROW, Chunk

MAX_BINS = 600
"""About as many as a chart has pixels to tell apart on a small screen."""

Rows = npt.NDArray[np.int64]


class Bins:
    """Sums of a rank's steps.

    Attributes:
        width: Steps per bin.
        first: The first step that may be added; the first bin begins at the multiple of `width` before it.
        sums: Sum of each column in each bin, but of `end_ns` the last; shape `(MAX_BINS, len(COLUMNS))`.
        counts: Steps in each bin so far.
        longest_ns: The longest step in each bin, as far as steps were added one by one.
        changes: Grows with every change.
    """

    def __init__(self, first: int = 0, width: int = 1) -> None:
        self.width = width
        self.first = first
        self.sums = np.zeros((MAX_BINS, len(COLUMNS)), dtype=np.int64)
        self.counts = np.zeros(MAX_BINS, dtype=np.int64)
        self.longest_ns = np.zeros(MAX_BINS, dtype=np.int64)
        self.changes = 0

    @property
    def start(self) -> int:
        """The step at which the first bin begins."""
        return self.first // self.width * self.width

    def make_room(self, end: int) -> None:
        """Widens the bins until all steps before `end` find one."""
        while end - self.start > MAX_BINS * self.width:
            self._double()

    def add(self, chunk: Chunk, *, one_by_one: bool) -> bool:
        """Adds a chunk; says whether it could be read.

        Args:
            chunk: Steps, none of them added before.
            one_by_one: Look at each step, for the longest; else the sum may do.
        """
        self.make_room(chunk.first + chunk.num_steps)
        bin = (chunk.first - self.start) // self.width
        if not one_by_one and bin == (chunk.first + chunk.num_steps - 1 - self.start) // self.width:
            self._sum_up(bin, chunk.num_steps, np.array(chunk.totals, dtype=np.int64))
            return True
        try:
            self.add_rows(chunk.first, chunk.rows())
        except BAD_ROW:
            return False
        return True

    def add_rows(self, first: int, rows: Rows) -> None:
        """Adds steps that follow each other, the first of which is `first`."""
        if not len(rows):
            return
        self.make_room(first + len(rows))
        bins = (np.arange(first, first + len(rows)) - self.start) // self.width
        starts = np.flatnonzero(np.diff(bins, prepend=bins[0] - 1))
        ends = np.append(starts[1:], len(rows))
        sums = np.add.reduceat(rows, starts, axis=0)
        sums[:, 0] = rows[ends - 1, 0]
        longest = np.maximum.reduceat(rows[:, len(COUNTS) :].sum(axis=1), starts)
        which = bins[starts]
        self.sums[which, 1:] += sums[:, 1:]
        self.sums[which, 0] = np.maximum(self.sums[which, 0], sums[:, 0])
        self.counts[which] += ends - starts
        self.longest_ns[which] = np.maximum(self.longest_ns[which], longest)
        self.changes += 1

    def _sum_up(self, bin: int, num_steps: int, totals: Rows) -> None:
        self.sums[bin, 1:] += totals[1:]
        self.sums[bin, 0] = max(int(self.sums[bin, 0]), int(totals[0]))
        self.counts[bin] += num_steps
        mean_ns = int(totals[len(COUNTS) :].sum()) // num_steps
        self.longest_ns[bin] = max(int(self.longest_ns[bin]), mean_ns)
        self.changes += 1

    def _double(self) -> None:
        """Makes one bin of each two."""
        odd = self.start // self.width % 2  # the wider first bin begins one bin earlier
        old_sums, old_counts, old_longest = self.sums, self.counts, self.longest_ns
        which = (np.arange(MAX_BINS) + odd) // 2
        self.sums, self.counts = np.zeros_like(old_sums), np.zeros_like(old_counts)
        self.longest_ns = np.zeros_like(old_longest)
        np.add.at(self.sums, which, old_sums)
        self.sums[:, 0] = 0
        np.maximum.at(self.sums[:, 0], which, old_sums[:, 0])
        np.add.at(self.counts, which, old_counts)
        np.maximum.at(self.longest_ns, which, old_longest)
        self.width *= 2
        self.changes += 1

    def copy(self) -> Bins:
        """Returns the same bins, to which more can be added."""
        other = Bins(self.first, self.width)
        other.sums, other.counts = self.sums.copy(), self.counts.copy()
        other.longest_ns = self.longest_ns.copy()
        return other

    def filled(self) -> slice:
        """Returns the bins from the first to the last that has a step."""
        used = np.flatnonzero(self.counts)
        return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
