"""Reads a rank's file piece by piece while it is being written: what is new, and what is older.

A connection that stays open would keep the job from closing its file (leaving the write-ahead log needs
the file alone), so each look opens the file, takes a piece and lets go of it.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS, DEVICE_COLUMNS
from diagnose.store.format import VERSION, pack_columns
from diagnose.store.reader import BAD_ROW, DAMAGE, connect, source_text, unpacked
from diagnose.store.writer import name_bytes

MAX_CHUNKS = 400
"""Rows taken at a time: some ten milliseconds."""

Rows = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Some finished steps that follow each other.

    Attributes:
        first: The first step.
        num_steps: How many.
        totals: The sum of each column, but of `end_ns` the last.
        packed: The columns, compressed.
    """

    first: int
    num_steps: int
    totals: list[int]
    packed: bytes

    def rows(self) -> Rows:
        """Returns the steps, shape `(num_steps, len(COLUMNS))`.

        Raises:
            zlib.error, ValueError: If they are damaged.
        """
        return unpacked(self.packed, len(COLUMNS), self.num_steps)

    def after(self, step: int) -> Chunk:
        """Returns those of its steps that begin with this one.

        Raises:
            zlib.error, ValueError: If they are damaged.
        """
        rows = self.rows()[step - self.first :]
        return Chunk(
            first=step,
            num_steps=len(rows),
            totals=[int(rows[-1, 0]), *rows[:, 1:].sum(axis=0).tolist()],
            packed=pack_columns(rows.T.tolist()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One row of the event table.

    Attributes:
        number: Its row.
        time_ns: When, by the clock of the steps.
    """

    number: int
    time_ns: int
    step: int
    kind: str
    detail: dict[str, Any]


class Look:
    """One look into a rank's file: an open connection.

    Args:
        db: The connection.
        has_begun: See there.

    Attributes:
        has_begun: Whether its writer has made all of its tables. Until then there is nothing in it, and
            what is not there yet is not damaged.
        damaged: Rows and tables that could not be read, in words.
    """

    def __init__(self, db: sqlite3.Connection, *, has_begun: bool = True) -> None:
        self._db = db
        self.has_begun = has_begun
        self.damaged: list[str] = []

    def meta(self) -> dict[str, Any]:
        """Returns what the rank says of itself, the latest of its state included."""
        facts = dict(
            self._read("SELECT key, value FROM meta", (), lambda key, value: (key, json.loads(value)))
        )
        state = facts.pop("state", {})
        return {**facts, **state} if isinstance(state, dict) else facts

    def num_steps(self) -> int:
        """Returns how many steps the file holds."""
        last = "SELECT first_step + num_steps FROM chunks ORDER BY first_step DESC LIMIT 1"
        return max((int(end) for (end,) in self._read(last)), default=0)

    def chunks_from(self, step: int, limit: int = MAX_CHUNKS) -> list[Chunk]:
        """Returns chunks that begin at this step or later, oldest first."""
        query = "SELECT * FROM chunks WHERE first_step >= ? ORDER BY first_step LIMIT ?"
        return self._read(query, (step, limit), _chunk)

    def chunks_after(self, step: int, limit: int = MAX_CHUNKS) -> list[Chunk]:
        """Returns what holds this step and later ones, oldest first; of a chunk that has been merged of
        others since, the steps that are new."""
        found = []
        for chunk in self.chunks_from(self.begin_of(step), limit + 1):
            if chunk.first >= step:
                found.append(chunk)
            elif chunk.first + chunk.num_steps > step:
                try:
                    found.append(chunk.after(step))
                except BAD_ROW:
                    self.damaged.append("chunks is damaged; rows of it are left out")
        return found[:limit]

    def chunks_before(self, step: int, limit: int = MAX_CHUNKS) -> list[Chunk]:
        """Returns chunks of steps before this one, newest first.

        One that goes on beyond it has been merged of others since; what follows has been read in them.
        """
        query = "SELECT * FROM chunks WHERE first_step < ? ORDER BY first_step DESC LIMIT ?"
        chunks: list[Chunk] = self._read(query, (step, limit), _chunk)
        return [chunk for chunk in chunks if chunk.first + chunk.num_steps <= step]

    def begin_of(self, step: int) -> int:
        """Returns the first step of the chunk that holds this one."""
        query = "SELECT max(first_step) FROM chunks WHERE first_step <= ?"
        return next((int(first) for (first,) in self._read(query, (step,)) if first is not None), 0)

    def meetings_from(self, number: int, limit: int = MAX_CHUNKS) -> list[Rows]:
        """Returns records of backward passes from this one on, each as `RankLog` has them."""
        if not self._has_table("meetings"):
            return []
        query = (
            "SELECT first, times FROM meetings WHERE first >= "
            "(SELECT coalesce(max(first), 0) FROM meetings WHERE first <= ?) ORDER BY first LIMIT ?"
        )
        found = self._read(query, (number, limit), _meeting)
        # A record whose first rows have been read was two, and has been merged since.
        return [times[max(0, number - first) :] for first, times in found if first + len(times) > number]

    def has_device_steps(self) -> bool:
        """Whether any step was seen by the device's clock."""
        return self._has_table("device_chunks") and bool(self._read("SELECT 1 FROM device_chunks LIMIT 1"))

    def device_steps(self, first: int, last: int) -> list[tuple[int, Rows]]:
        """Returns what the device's clock tells of some steps, and of a few around them:
        first step and rows, in the order of `DEVICE_COLUMNS`."""
        query = (
            "SELECT first_step, num_steps, columns FROM device_chunks "
            "WHERE first_step < ? AND first_step >= "
            "(SELECT coalesce(max(first_step), 0) FROM device_chunks WHERE first_step <= ?) "
            "ORDER BY first_step"
        )
        return self._read(query, (last, first), _device_chunk)

    def events_after(self, number: int, kinds: tuple[str, ...], limit: int) -> list[Event]:
        """Returns later events of some kinds, in order."""
        marks = ", ".join("?" * len(kinds))
        query = f"SELECT rowid, * FROM events WHERE rowid > ? AND kind IN ({marks}) ORDER BY rowid LIMIT ?"
        return self._read(query, (number, *kinds, limit), _event)

    def vitals_after(self, time_ns: int, limit: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Returns later readings of the operating system: time, step, running totals."""
        query = "SELECT * FROM vitals WHERE time_ns > ? ORDER BY time_ns LIMIT ?"
        return self._read(query, (time_ns, limit), _vital)

    def spread_vitals(self, count: int) -> list[tuple[int, int, dict[str, Any]]]:
        """Returns about so many readings, evenly spread over the run, without reading the others."""
        ends = self._read("SELECT min(time_ns), max(time_ns) FROM vitals")
        if not ends or ends[0][0] is None:
            return []
        first, last = ends[0]
        query = "SELECT * FROM vitals WHERE time_ns >= ? ORDER BY time_ns LIMIT 1"
        found = {
            row[0]: row
            for time_ns in np.linspace(first, last, count).astype(int).tolist()
            for row in self._read(query, (time_ns,), _vital)
        }
        return [found[time_ns] for time_ns in sorted(found)]

    def source(self, file: str) -> str | None:
        """Returns the text of a source file as it was during training; `None` if it was not kept."""
        if not self._has_table("sources"):
            return None
        query = "SELECT text FROM sources WHERE file = CAST(? AS TEXT)"
        found: list[str] = self._read(query, (name_bytes(file),), source_text)
        return next(iter(found), None)

    def _has_table(self, name: str) -> bool:
        """Whether there is a table that came later: files of before have none, and miss nothing."""
        return bool(self._read("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)))

    def _read(
        self, query: str, values: tuple[Any, ...] = (), parse: Callable[..., Any] = lambda *row: row
    ) -> list[Any]:
        rows: list[Any] = []
        if not self.has_begun:
            return rows
        table = query.partition(" FROM ")[2].partition(" ")[0]
        try:
            for row in self._db.execute(query, values):
                try:
                    rows.append(parse(*row))
                except BAD_ROW:
                    self.damaged.append(f"{table} is damaged; rows of it are left out")
        except DAMAGE as error:
            self.damaged.append(f"{table} is damaged ({error})")
        return rows


@contextmanager
def look(path: Path) -> Iterator[Look]:
    """Opens a rank's file for one look.

    Raises:
        sqlite3.DatabaseError: If it is no such file, or is gone.
        ValueError: If a newer version wrote it.
    """
    db = connect(path)
    try:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise ValueError(f"written by a newer diagnose: format {version}, not {VERSION}")
        # The version is what its writer sets last, before the first row.
        yield Look(db, has_begun=version > 0 or _has_rows(db))
    finally:
        db.close()


def _has_rows(db: sqlite3.Connection) -> bool:
    """Whether a file without a version holds something all the same, as one that was recovered may."""
    try:
        return bool(db.execute("SELECT 1 FROM meta LIMIT 1").fetchall())
    except DAMAGE:
        return False


def _chunk(first: int, num_steps: int, totals: str, packed: bytes) -> Chunk:
    sums = json.loads(totals)
    if len(sums) != len(COLUMNS) or not all(isinstance(each, int) for each in sums) or num_steps < 1:
        raise ValueError(totals)
    return Chunk(first=int(first), num_steps=int(num_steps), totals=sums, packed=bytes(packed))


def _meeting(first: int, packed: bytes) -> tuple[int, Rows]:
    return int(first), unpacked(packed, 2)


def _device_chunk(first: int, num_steps: int, packed: bytes) -> tuple[int, Rows]:
    return int(first), unpacked(packed, len(DEVICE_COLUMNS), num_steps)


def _event(number: int, time_ns: int, step: int, kind: str, detail: str) -> Event:
    parsed = json.loads(detail)
    if not isinstance(parsed, dict):
        raise ValueError(detail)
    return Event(number=number, time_ns=int(time_ns), step=int(step), kind=kind, detail=parsed)


def _vital(time_ns: int, step: int, readings: str) -> tuple[int, int, dict[str, Any]]:
    parsed = json.loads(readings)
    if not isinstance(parsed, dict):
        raise ValueError(readings)
    return int(time_ns), int(step), parsed
