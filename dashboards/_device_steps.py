"""The first rank's steps by the device's clock, which tells of a step some time after the host's.

A step is settled once the device's clock has told of it or of a later one, and then never changes: it is
the device's, or the host's where that clock was not heard. The report does the same with a run as a whole,
see `analysis.device_ledger`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import Bins

from diagnose.analysis.device_ledger import HOLES, MIN_COVERAGE, TIMES
from diagnose.core.ledger import COLUMNS, COUNTS, SLOTS
from diagnose.store.reader import BAD_ROW
from diagnose.store.tail import Chunk, Look, look

MAX_WAITING = 4096
"""Steps that may wait for the device's clock: so far ahead of its device no training thread is."""

PIECE = 100
"""Flushes read at a time: with those of the device, and one by one, a piece takes some ten milliseconds."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Steps as one of the two clocks saw them.

    Attributes:
        bins: All of them.
        recent: The newest one by one, up to `num_steps`.
        num_steps: The end of what that clock has told.
        device_share: The part of them that is by the device's clock; `None` where all are by the host's.
    """

    bins: Bins
    recent: Rows
    num_steps: int
    device_share: float | None = None


class DeviceSteps:
    """Joins what both clocks tell of the same steps.

    Args:
        num_recent: So many of the newest steps are kept one by one.
    """

    def __init__(self, num_recent: int) -> None:
        self._bins = Bins()
        self._recent = _none()
        self._waiting = _none()
        self._end: int | None = None  # the steps before it are settled, or history
        self._covered = 0
        self._num_recent = num_recent

    def read(self, file: Look, chunks: Sequence[Chunk], *, is_heard: bool) -> None:
        """Takes the host's newest steps, oldest first, and settles what the device has told of.

        Args:
            file: The rank's.
            chunks: The steps.
            is_heard: Whether the device's clock will tell more.
        """
        for chunk in chunks:
            rows = _rows_of(chunk)
            if self._end is None:
                self._end = chunk.first
            if chunk.first != self._end + len(self._waiting) or not len(rows):
                self._settle(file, is_heard=False)  # nothing joins on to what is damaged, or missing
                self._recent = _none()
                self._end = chunk.first + chunk.num_steps - len(rows)
            self._waiting = np.concatenate([self._waiting, rows])
        self._settle(file, is_heard=is_heard)

    def read_older(self, file: Look, chunks: Sequence[Chunk]) -> None:
        """Takes a piece of the history, newest first: the device has told of all that it will."""
        if chunks:
            told = file.device_steps(chunks[-1].first, chunks[0].first + chunks[0].num_steps)
            for chunk in chunks:
                rows, covered = joined(chunk.first, _rows_of(chunk), told)
                self._covered += covered
                self._bins.add_rows(chunk.first, rows)

    def seen(self, end: int, *, over: bool) -> Seen | None:
        """Returns the steps; `None` where the clock was heard in too few.

        Args:
            end: Steps of the rank that has most, for which the bins make room.
            over: The clock tells nothing more, so that what waits is the host's.
        """
        self._bins.make_room(end)
        settled = self._end or 0
        bins, recent = self._bins, self._recent
        if over:
            bins = bins.copy()
            bins.add_rows(settled, self._waiting)
            recent = np.concatenate([recent, self._waiting])[-self._num_recent :]
            settled += len(self._waiting)
        count = int(bins.counts.sum())
        if not self._covered or self._covered < MIN_COVERAGE * count:
            return None
        return Seen(bins=bins, recent=recent, num_steps=settled, device_share=self._covered / count)

    def _settle(self, file: Look, *, is_heard: bool) -> None:
        if self._end is None or not len(self._waiting):
            return
        told = file.device_steps(self._end, self._end + len(self._waiting))
        count = len(self._waiting)
        if is_heard:
            end = max((first + len(rows) for first, rows in told), default=self._end)
            count = min(count, max(end - self._end, count - MAX_WAITING, 0))
        rows, covered = joined(self._end, self._waiting[:count], told)
        self._covered += covered
        self._bins.add_rows(self._end, rows)
        self._recent = np.concatenate([self._recent, rows])[-self._num_recent :]
        self._waiting = self._waiting[count:]
        self._end += count


def joined(first: int, rows: Rows, told: Sequence[tuple[int, Rows]]) -> tuple[Rows, int]:
    """Returns steps with the slots that the device's clock tells, and how many these are.

    Args:
        first: The first step.
        rows: The steps by the host's clock.
        told: First step and rows of what the device's clock tells, in the order of `DEVICE_COLUMNS`.
    """
    rows, covered = rows.copy(), 0
    for begin, device in told:
        shared = slice(max(first, begin), min(first + len(rows), begin + len(device)))
        if shared.start < shared.stop:
            own = device[shared.start - begin : shared.stop - begin]
            heard = own[:, HOLES] == 0
            which = np.flatnonzero(heard) + shared.start - first
            rows[which, len(COUNTS) :] = own[heard, TIMES : TIMES + len(SLOTS)]
            covered += len(which)
    return rows, covered


def bins_by_device(path: Path, like: Bins, first: int, last: int) -> Bins:
    """Returns steps from `first` to before `last`, in bins as of others.

    Raises:
        sqlite3.DatabaseError, OSError, ValueError: If the file cannot be read.
    """
    bins = Bins(like.first, like.width)
    begin: int | None = None
    while begin is None or begin < last:
        with look(path) as file:
            begin = file.begin_of(first) if begin is None else begin
            chunks = file.chunks_from(begin, PIECE)
            told = file.device_steps(begin, chunks[-1].first + chunks[-1].num_steps) if chunks else []
        for chunk in chunks:
            rows, _ = joined(chunk.first, _rows_of(chunk), told)
            cut = rows[max(first - chunk.first, 0) : max(last - chunk.first, 0)]
            bins.add_rows(max(first, chunk.first), cut)
        if len(chunks) < PIECE:
            break
        begin = chunks[-1].first + 1
    return bins


def _rows_of(chunk: Chunk) -> Rows:
    with contextlib.suppress(*BAD_ROW):
        return chunk.rows()
    return _none()


def _none() -> Rows:
    return np.zeros((0, len(COLUMNS)), dtype=np.int64)
