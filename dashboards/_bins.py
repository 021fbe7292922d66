"""A rank's steps as at most 600 bins, filled in any order: a run of any length takes the same room.

A bin is a power of two of steps wide and begins at a multiple of its width. So an old bin never changes
when the run grows, save that two of them become one; and steps can be added from the newest back to the
oldest.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS
from diagnose.store.reader import BAD_ROW
from diagnose.store.tail import Chunk

MAX_BINS = 600
"""About as many as a chart has pixels to tell apart on a small screen."""

Rows = npt.NDArray[np.int64]


class Bins:
    """Sums of a rank's steps.

    Attributes:
        width: Steps per bin.
        first: The first step that may be added; the first bin begins at the multiple of `width` before it.
        sums: Sum of each column in each bin, but of `end_ns`; shape `(MAX_BINS, len(COLUMNS))`.
        counts: Steps in each bin so far.
        changes: Grows with every change.
    """

    def __init__(self, first: int = 0, width: int = 1) -> None:
        self.width = width
        self.first = first
        self.sums = np.zeros((MAX_BINS, len(COLUMNS)), dtype=np.int64)
        self.counts = np.zeros(MAX_BINS, dtype=np.int64)
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
            one_by_one: Look at each step, as one may be damaged; else the sum may do.
        """
        self.make_room(chunk.first + chunk.num_steps)
        bin = (chunk.first - self.start) // self.width
        if not one_by_one and bin == (chunk.first + chunk.num_steps - 1 - self.start) // self.width:
            self.sums[bin, 1:] += np.array(chunk.totals[1:], dtype=np.int64)
            self.counts[bin] += chunk.num_steps
            self.changes += 1
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
        which = bins[starts]
        self.sums[which, 1:] += np.add.reduceat(rows[:, 1:], starts, axis=0)
        self.counts[which] += np.diff(starts, append=len(rows))
        self.changes += 1

    def _double(self) -> None:
        """Makes one bin of each two."""
        odd = self.start // self.width % 2  # the wider first bin begins one bin earlier
        old_sums, old_counts = self.sums, self.counts
        which = (np.arange(MAX_BINS) + odd) // 2
        self.sums, self.counts = np.zeros_like(old_sums), np.zeros_like(old_counts)
        np.add.at(self.sums, which, old_sums)
        np.add.at(self.counts, which, old_counts)
        self.width *= 2
        self.changes += 1

    def copy(self) -> Bins:
        """Returns the same bins, to which more can be added."""
        other = Bins(self.first, self.width)
        other.sums, other.counts = self.sums.copy(), self.counts.copy()
        return other

    def filled(self) -> slice:
        """Returns the bins from the first to the last that has a step."""
        used = np.flatnonzero(self.counts)
        return slice(int(used[0]), int(used[-1]) + 1) if len(used) else slice(0, 0)
