"""One rank's file, followed: its steps in bins, the newest of them one by one, and what else it tells."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import Bins
from diagnose.dashboards._device_steps import PIECE, DeviceSteps, Seen
from diagnose.dashboards._rank_series import RankSeries
from diagnose.dashboards._waits import RankWaits

from diagnose.core.ledger import COLUMNS
from diagnose.store.reader import BAD_ROW
from diagnose.store.runs import number_of
from diagnose.store.tail import MAX_CHUNKS, Chunk, Event, Look, look

RECENT_STEPS = 512
"""The newest steps are kept one by one."""

FIRST_CHUNKS = 32
"""Rows that are looked at for the newest steps, then twice as many: of a slow job one holds a single step,
of a fast one a few hold enough."""

MAX_VITALS = 1200
"""Readings that are kept; when there are more, every second one is dropped."""

MAX_EVENTS = 1000
"""Events of tuning and commands that are read at a time, and about how many are kept: a run has dozens."""

MAX_DAMAGES = 3
"""Kinds of damage that are told; more of them say no more."""

Rows = npt.NDArray[np.int64]


class RankTail:
    """Follows one rank's file.

    Args:
        path: The file.
        kinds: The events to read.
        first: Whether it is the first rank's: only of that one each step, event and reading is looked at.

    Attributes:
        number: The rank.
        bins: Its steps so far.
        num_steps: Steps in the file.
        begun_ns: When its first step ended, by its own clock; `None` until that was read.
        recent: The newest steps one by one, shape `(at most RECENT_STEPS, len(COLUMNS))`.
        meta: What it says of itself.
        events: In order.
        vitals: Time, step, running totals.
        waits: What it waits for gradients of other ranks.
        words: Why it cannot be read, or what of it is damaged.
        has_begun: Whether anything can have been written to it: see `Look`.
        has_more: Whether the last look left something new for the next.
        asked_at: Steps of the first rank when this one was asked last.
        behind_steps: How many of those this one had not told of then.
        series: What is drawn of it.
    """

    def __init__(self, path: Path, kinds: tuple[str, ...], *, first: bool) -> None:
        self.path = path
        self.number = number_of(path)
        self.bins = Bins()
        self.num_steps = 0
        self.begun_ns: int | None = None
        self.recent: Rows = np.zeros((0, len(COLUMNS)), dtype=np.int64)
        self.meta: dict[str, Any] = {}
        self.events: list[Event] = []
        self.vitals: list[tuple[int, int, dict[str, Any]]] = []
        self.waits = RankWaits()
        self.words = ""
        self.has_begun = True
        self.has_more = False
        self.asked_at = 0
        self.behind_steps = 0
        self.series = RankSeries()
        self._first = first
        self._device: DeviceSteps | None = None
        self._kinds = kinds
        self._oldest: int | None = None  # steps before this one have not been read yet
        self._stamp: tuple[int, ...] = ()
        self._last_event = 0
        self._torn = 0
        self._damaged: dict[str, None] = {}  # in the order in which it was met

    @property
    def unread_steps(self) -> int:
        """Steps at the beginning that have not been read yet."""
        return self._oldest or 0

    @property
    def unread_waits(self) -> int:
        """Steps of which it has not been read what they waited for other ranks."""
        return max(0, self.num_steps - self.waits.next_step) if self.waits.any else 0

    def poll(self) -> bool:
        """Reads what is new; says whether there was anything."""
        stamp = stamp_of(self.path)
        if stamp == self._stamp:
            return False
        try:
            with look(self.path) as file:
                self.has_begun = file.has_begun
                self.has_more = self._read_new(file)
        except (sqlite3.DatabaseError, ValueError, OSError) as error:
            self.words = f"{self.path.name} cannot be read ({error})"
        else:
            self._say(file.damaged)
            # With more than one look can take, the next one must not think that nothing has changed; nor
            # after one that came before the first commit.
            self._stamp = stamp if self.has_begun and not self.has_more else ()
        return self.has_begun

    def fill(self) -> None:
        """Reads a piece of the history, the newest first; then of the waits, the oldest first."""
        chunks = []
        try:
            with look(self.path) as file:
                if self._oldest:
                    chunks = file.chunks_before(self._oldest, self._piece)
                    if self._device is not None:
                        self._device.read_older(file, chunks)
                elif not self.waits.read(file):
                    self.waits = RankWaits()  # there should be more: it is damaged
                damaged = file.damaged
        except (sqlite3.DatabaseError, ValueError, OSError) as error:
            self.words = f"{self.path.name} cannot be read ({error})"
            self._oldest = 0
            self.waits = RankWaits()
            return
        for chunk in chunks:
            self._add(chunk)
        self._oldest = chunks[-1].first if chunks else 0
        self._say(damaged)

    def seen(self, end: int, *, over: bool) -> Seen:
        """Returns the steps by the device's clock where it was heard in most of them, else by the host's.

        Args:
            end: Steps of the rank that has most, for which the bins make room.
            over: No clock will tell more.
        """
        by_device = self._device.seen(end, over=over) if self._device is not None else None
        self.bins.make_room(end)
        return by_device or Seen(bins=self.bins, recent=self.recent, num_steps=self.num_steps)

    @property
    def _piece(self) -> int:
        return MAX_CHUNKS if self._device is None else PIECE

    def _read_new(self, file: Look) -> bool:
        self.meta = file.meta() or self.meta
        more = False
        if self._first and self._device is None and file.has_device_steps():
            self._start_over(DeviceSteps(RECENT_STEPS))
        if self._oldest is None:
            chunks = self._newest(file)
            if not chunks:
                return False
            self._oldest = chunks[0].first
            self._find_begin(file)
        else:
            chunks = file.chunks_after(self.num_steps, self._piece)
        for chunk in chunks:
            self._add(chunk)
        self._remember(chunks)
        if self._device is not None:
            clock = (self.meta.get("facts") or {}).get("device_clock") or {}
            self._device.read(file, chunks, is_heard=not clock.get("gave_up"))
        if chunks:
            self.num_steps = max(self.num_steps, chunks[-1].first + chunks[-1].num_steps)
        self.waits.look_for(file)
        if 0 < self.unread_waits <= RECENT_STEPS:  # of a long run, what is drawn first comes first
            self.waits.read(file)
        if self._first:
            more = self._read_events(file) | self._read_vitals(file)
        return more or len(chunks) == self._piece

    def _start_over(self, device: DeviceSteps) -> None:
        """Reads the steps again, now that they are to be joined with what the device's clock tells."""
        self._device = device
        self._oldest, self._torn, self.num_steps = None, 0, 0
        self.bins, self.recent, self.series = Bins(), self.recent[:0], RankSeries()

    def _newest(self, file: Look) -> list[Chunk]:
        """Returns the newest chunks that hold `RECENT_STEPS` steps, oldest first."""
        limit = FIRST_CHUNKS
        found = file.chunks_before(2**62, limit)
        while sum(chunk.num_steps for chunk in found) < RECENT_STEPS and limit < MAX_CHUNKS:
            if len(found) < limit and not file.damaged:
                break
            limit = min(2 * limit, MAX_CHUNKS)
            found = file.chunks_before(2**62, limit)
        chunks: list[Chunk] = []
        steps = 0
        for chunk in found:
            chunks.append(chunk)
            steps += chunk.num_steps
            if steps >= RECENT_STEPS:
                break
        return chunks[::-1]

    def _find_begin(self, file: Look) -> None:
        for chunk in file.chunks_from(0, 1):
            try:
                self.begun_ns = int(chunk.rows()[0, 0])
            except BAD_ROW:
                self.begun_ns = chunk.totals[0]

    def _add(self, chunk: Chunk) -> None:
        if not self.bins.add(chunk, one_by_one=self._first):
            self._torn += chunk.num_steps

    def _remember(self, chunks: list[Chunk]) -> None:
        if not chunks:
            return
        pieces, end = [self.recent], self.num_steps
        for chunk in chunks:
            if chunk.first != end:
                pieces = []  # what follows does not join on to what was before
            end = chunk.first + chunk.num_steps
            try:
                pieces.append(chunk.rows())
            except BAD_ROW:
                pieces = []
        self.recent = np.concatenate([self.recent[:0], *pieces])[-RECENT_STEPS:]

    def _read_events(self, file: Look) -> bool:
        """Reads new events; says whether there may be more."""
        new = file.events_after(self._last_event, self._kinds, MAX_EVENTS)
        if new:
            self._last_event = new[-1].number
            self.events += new
        if len(self.events) >= 2 * MAX_EVENTS:
            # What is measured again every few hundred steps makes a long run's events many; the newest do.
            older, newest = self.events[:-MAX_EVENTS], self.events[-MAX_EVENTS:]
            self.events = [event for event in older if event.kind != "recheck"] + newest
        return len(new) == MAX_EVENTS

    def _read_vitals(self, file: Look) -> bool:
        """Reads new readings; says whether there may be more."""
        if not self.vitals:
            self.vitals = file.spread_vitals(MAX_VITALS // 2)
            return False
        new = file.vitals_after(self.vitals[-1][0], MAX_VITALS)
        self.vitals += new
        if len(self.vitals) > MAX_VITALS:
            self.vitals = [*self.vitals[:-1:2], self.vitals[-1]]
        return len(new) == MAX_VITALS

    def _say(self, damaged: list[str]) -> None:
        self._damaged.update(dict.fromkeys(damaged))
        words = list(self._damaged)[:MAX_DAMAGES]
        if self._torn:
            words.append(f"{self._torn} steps are damaged and left out")
        self.words = f"{self.path.name}: {'; '.join(words)}" if words else ""


def stamp_of(path: Path) -> tuple[int, ...]:
    """Returns what changes with every commit to a file."""
    found: list[int] = []
    for name in (path, f"{path}-wal"):
        try:
            status = os.stat(name)
        except OSError:
            found += [0, 0]
        else:
            found += [status.st_mtime_ns, status.st_size]
    return tuple(found)
