"""Follows a run's files from outside, and makes readings of what is new in them.

Steps are summed up as the store's tail hands them over, so a look costs what was recorded since the look
before. Only now and then, and at the end, is the whole run analysed: for its findings, and for how the time
between hooks divides among the phases.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.beside import ANALYSE_SHARE, MAX_RECORDS
from diagnose.analysis.gaps import phase_weights
from diagnose.analysis.profile import analysed
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import NS_PER_MS, NS_PER_S
from diagnose.export._reading import Point, RankReading, Reading
from diagnose.rules import diagnosed
from diagnose.store.reader import BAD_ROW
from diagnose.store.runs import rank_files
from diagnose.store.tail import MAX_CHUNKS, Chunk, Look, look

MAX_POINTS = 1000
"""Points of one look. More than this no chart shows, and a hosted tool would be slow to take."""

ONE_BY_ONE = 100_000
"""So many steps are unpacked to be made into points; of more, whole chunks are summed up."""

SCRIPT_EVENTS = ("gc", "checkpoint", "compile")
"""Events that are counted: those of the script, and not the tuner's."""

EVENTS_AT_A_TIME = 10_000
VITALS_AT_A_TIME = 1000

SAMPLES, TOKENS = COLUMNS.index("samples"), COLUMNS.index("tokens")

UNREADABLE = (sqlite3.DatabaseError, ValueError, OSError)
"""What a look at a torn, foreign or vanished file raises."""

Weights = npt.NDArray[np.float64]
Totals = npt.NDArray[np.int64]


class Follower:
    """Looks at one run again and again.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ranks: dict[str, _Rank] = {}
        self._profile: Profile | None = None
        self._analyse_after = 0.0

    def look(self, *, is_last: bool) -> Reading:
        """Reads what is new.

        Args:
            is_last: The run is over, or will not be looked at again: it is analysed once more.

        Raises:
            DiagnoseError: If a newer version wrote it.
        """
        paths = rank_files(self.folder)  # of one attempt: after a restart others
        self._ranks = {path.name: self._ranks.get(path.name) or _Rank(path) for path in paths}
        if is_last or monotonic() >= self._analyse_after:
            self._analyse(is_last=is_last)
        assert self._profile is not None
        points: list[Point] = []
        for index, rank in enumerate(self._ranks.values()):
            found = rank.read(want_points=index == 0)
            points += found
        trained = tuple(rank.reading() for rank in self._ranks.values() if rank.num_steps)
        return Reading(
            folder=self.folder,
            profile=self._profile,
            ranks=trained,
            points=tuple(points),
            is_last=is_last,
        )

    def _analyse(self, *, is_last: bool) -> None:
        records = sum(rank.num_steps for rank in self._ranks.values())
        if records > MAX_RECORDS and self._profile is not None and not is_last:
            return
        begun = monotonic()
        profile, parts = analysed(self.folder, alone=not is_last)
        self._profile = diagnosed(profile)
        for name, rank in self._ranks.items():
            rank.weights = phase_weights(parts.get(name, {}))
        now = monotonic()
        # Before there are steps nothing was analysed yet, and the next look must do it.
        has_steps = self._profile.steps.count > 0
        self._analyse_after = now + (now - begun) / ANALYSE_SHARE if has_steps else 0.0


class _Rank:
    """One rank's file.

    Attributes:
        weights: What part of each slot belongs to each phase, as it is known now. What was charged stays
            charged as it was: sums that are exported must not fall.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: Weights = phase_weights({})
        self.num_steps = 0
        self._meta: dict[str, Any] = {}
        self._totals: Totals = np.zeros(len(COLUMNS), dtype=np.int64)
        self._phase_ns = np.zeros(len(Phase))
        self._events: Counter[str] = Counter()
        self._last_event = 0
        self._vitals_ns = -1
        self._resident_bytes: int | None = None
        self._new: Totals = np.zeros(len(COLUMNS), dtype=np.int64)
        self._num_new = 0

    def read(self, *, want_points: bool) -> list[Point]:
        """Reads what is new; a file that cannot be read now may be readable at the next look."""
        self._new, self._num_new = np.zeros(len(COLUMNS), dtype=np.int64), 0
        chunks: list[Chunk] = []
        with contextlib.suppress(*UNREADABLE), look(self.path) as file:
            self._meta = file.meta() or self._meta
            for chunk in self._new_chunks(file):
                self._add(chunk)
                chunks.append(chunk)
            self._read_events(file)
            self._read_memory(file)
        return points_of(chunks, self.weights, unix_minus_clock_ns(self._meta)) if want_points else []

    def reading(self) -> RankReading:
        """Returns the sums so far."""
        new_ns = int(self._new[len(COUNTS) :].sum())
        last_ns = int(self._totals[0]) + unix_minus_clock_ns(self._meta)
        return RankReading(
            name=rank_name(self.path),
            host=str(self._meta.get("host", "")),
            num_steps=self.num_steps,
            samples=int(self._totals[SAMPLES]),
            tokens=int(self._totals[TOKENS]),
            phase_ns=dict(zip(Phase, self._phase_ns.tolist(), strict=True)),
            num_events=dict(self._events),
            resident_bytes=self._resident_bytes,
            step_ns=new_ns / self._num_new if self._num_new else None,
            samples_per_s=_rate(int(self._new[SAMPLES]), new_ns),
            last_unix=last_ns / NS_PER_S if self.num_steps else None,
        )

    def _new_chunks(self, file: Look) -> Iterator[Chunk]:
        while chunks := file.chunks_after(self.num_steps):
            yield from chunks
            if len(chunks) < MAX_CHUNKS:
                break

    def _add(self, chunk: Chunk) -> None:
        totals = np.array(chunk.totals, dtype=np.int64)
        self._new[1:] += totals[1:]
        self._totals[0] = totals[0]
        self._totals[1:] += totals[1:]
        self._phase_ns += totals[len(COUNTS) :] @ self.weights
        self._num_new += chunk.num_steps
        self.num_steps = chunk.first + chunk.num_steps

    def _read_events(self, file: Look) -> None:
        while events := file.events_after(self._last_event, SCRIPT_EVENTS, EVENTS_AT_A_TIME):
            self._events.update(event.kind for event in events)
            self._last_event = events[-1].number

    def _read_memory(self, file: Look) -> None:
        while vitals := file.vitals_after(self._vitals_ns, VITALS_AT_A_TIME):
            self._vitals_ns = vitals[-1][0]
            resident = vitals[-1][2].get("resident_bytes")
            self._resident_bytes = resident if isinstance(resident, int) else None


def rank_name(path: Path) -> str:
    """Returns what a rank is called in what is exported, the same in each attempt: see `RankReading`."""
    return re.sub(r"-restart\d+", "", path.name.removeprefix("rank").removesuffix(".sqlite"))


def unix_minus_clock_ns(meta: Mapping[str, Any]) -> int:
    """Returns what to add to a time of a rank's steps to have it in nanoseconds since 1970."""
    anchor = meta.get("anchor_ns")
    if isinstance(anchor, list) and len(anchor) == 2 and all(isinstance(each, int) for each in anchor):
        return int(anchor[1]) - int(anchor[0])
    return 0


def points_of(chunks: Sequence[Chunk], weights: Weights, offset_ns: int) -> list[Point]:
    """Makes at most `MAX_POINTS` points, each of about as many steps.

    Args:
        chunks: Steps that follow each other.
        weights: As of `phase_weights`.
        offset_ns: As of `unix_minus_clock_ns`.
    """
    pieces: list[tuple[int, int, Totals]] = []  # last step, number of steps, sums
    one_by_one = sum(chunk.num_steps for chunk in chunks) <= ONE_BY_ONE
    for chunk in chunks:
        if one_by_one:
            try:
                pieces += [(chunk.first + index, 1, row) for index, row in enumerate(chunk.rows())]
                continue
            except BAD_ROW:
                pass
        last = chunk.first + chunk.num_steps - 1
        pieces.append((last, chunk.num_steps, np.array(chunk.totals, dtype=np.int64)))
    size = -(-len(pieces) // MAX_POINTS)
    groups = [pieces[first : first + size] for first in range(0, len(pieces), size or 1)]
    return [_point(group, weights, offset_ns) for group in groups]


def _point(group: Sequence[tuple[int, int, Totals]], weights: Weights, offset_ns: int) -> Point:
    num_steps = sum(count for _, count, _ in group)
    sums = np.sum([totals for _, _, totals in group], axis=0)
    slots = sums[len(COUNTS) :]
    phases = slots @ weights / num_steps / NS_PER_MS
    time_ns = int(slots.sum())
    return Point(
        step=group[-1][0],
        unix=(int(group[-1][2][0]) + offset_ns) / NS_PER_S,
        step_ms=time_ns / num_steps / NS_PER_MS,
        phase_ms=dict(zip(Phase, phases.tolist(), strict=True)),
        samples_per_s=_rate(int(sums[SAMPLES]), time_ns),
        tokens_per_s=_rate(int(sums[TOKENS]), time_ns),
    )


def _rate(count: int, time_ns: int) -> float | None:
    return count * NS_PER_S / time_ns if count and time_ns else None
