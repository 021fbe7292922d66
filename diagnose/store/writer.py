"""Writes one rank's file. Lives in the flusher's thread of the training process."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import sqlite3
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from diagnose.core.ledger import COLUMNS, DEVICE_COLUMNS
from diagnose.store.format import SCHEMA, VERSION, pack, pack_columns
from diagnose.store.merging import Merging

BUCKETS = 64
"""A bucket of sampled stacks spans this part of the steps before it, which is less than a look at any part
of a run can tell from its neighbours."""

MAX_SOURCES = 64
MAX_SOURCE_BYTES = 1 << 20
"""A longer file was written by a program."""

LONGEST_WAIT_MS = 1000
"""So long the end of a script waits for somebody who reads the file; a look takes a hundredth of it."""

Frames = Sequence[tuple[str, int, str]]
"""A sampled stack of file, line and function: the frame of an installed package, or one without a file,
then the user's frames, innermost first."""


class Writer:
    """The one writer of a rank's SQLite file.

    A connection must not cross a fork, nor threads: make the writer in the thread that uses it.

    Args:
        folder: The run's folder; must exist.
        rank: Number of this rank. A second process of the same rank gets a file of its own.
        restart: How often the ranks of the job have been restarted. Each attempt has its own files.

    Attributes:
        path: The file.
        safe_steps: Steps that are on disk for certain.
        journal: `wal`, or `delete` where the file system cannot do WAL.

    Raises:
        OSError: If the folder cannot be written.
        sqlite3.Error: If SQLite cannot.
    """

    def __init__(self, folder: Path, rank: int, restart: int = 0) -> None:
        self.path = _free_name(folder, f"rank{rank}-restart{restart}" if restart else f"rank{rank}")
        try:
            self._db, self.journal = _open(self.path)
        except (sqlite3.Error, OSError):
            _remove(self.path)
            raise
        self._stacks: dict[str, int] = {}
        self._sources: set[str] = set()
        self._steps = 0
        self._meetings = 0
        self._chunks_merging = Merging(self._db, "chunks", "columns", len(COLUMNS), "num_steps", "totals")
        self._device_merging = Merging(
            self._db, "device_chunks", "columns", len(DEVICE_COLUMNS), "num_steps"
        )
        self._meetings_merging = Merging(self._db, "meetings", "times", 2)
        self._bucket = (0, 0)
        self._sampled: dict[tuple[int, int], int] = {}
        self.safe_steps = 0

    def add_steps(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Appends finished steps, in the order of `core.ledger.COLUMNS`."""
        if not rows:
            return
        self._db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?)", (self._steps, len(rows), *pack(rows)))
        self._chunks_merging.added(self._steps, len(rows))
        self._steps += len(rows)

    def add_device_steps(self, first_step: int, rows: Sequence[tuple[int, ...]]) -> None:
        """Adds steps by the device's clock, in the order of `core.ledger.DEVICE_COLUMNS`."""
        if rows:
            packed = pack_columns(list(zip(*rows, strict=True)))
            self._db.execute("INSERT INTO device_chunks VALUES (?, ?, ?)", (first_step, len(rows), packed))
            self._device_merging.added(first_step, len(rows))

    def add_meetings(self, meetings: Sequence[tuple[int, int]]) -> None:
        """Appends backward passes: when this rank's gradients were there, and when those of all ranks."""
        if meetings:
            packed = pack_columns(list(zip(*meetings, strict=True)))
            self._db.execute("INSERT INTO meetings VALUES (?, ?)", (self._meetings, packed))
            self._meetings_merging.added(self._meetings, len(meetings))
            self._meetings += len(meetings)

    def add_samples(self, first_step: int, samples: Iterable[tuple[int, Frames, int]]) -> None:
        """Adds sampled stacks of the steps from `first_step` on: slot, frames, nanoseconds.

        The further a run has gone, the longer a bucket holds: their number grows with its logarithm.
        """
        if not self._bucket[0] <= first_step < self._bucket[1]:
            self._bucket = (first_step, first_step + 1 + first_step // BUCKETS)
            self._sampled = {}
        for slot, frames, weight in samples:
            stack = self._stack(frames)
            row = self._sampled.get((slot, stack))
            if row is None:
                values = (self._bucket[0], slot, stack, weight)
                inserted = self._db.execute("INSERT INTO samples VALUES (?, ?, ?, ?)", values)
                self._sampled[slot, stack] = inserted.lastrowid or 0
            else:
                more = "UPDATE samples SET weight_ns = weight_ns + ? WHERE rowid = ?"
                self._db.execute(more, (weight, row))

    def add_standing(self, frames: Frames, passed_ns: int, off_cpu_ns: int) -> None:
        """Adds a stack that the training thread was twice sampled in: the time in between, and how much of
        that the thread used no CPU."""
        self._db.execute(
            "INSERT INTO standing VALUES (?, ?, ?) ON CONFLICT (stack) DO UPDATE SET "
            "passed_ns = passed_ns + excluded.passed_ns, off_cpu_ns = off_cpu_ns + excluded.off_cpu_ns",
            (self._stack(frames), passed_ns, off_cpu_ns),
        )

    def set_writing(self, rows: Iterable[tuple[Frames, int, int, int]]) -> None:
        """Replaces how often stacks were looked at, and how often in the midst of writing to gradients, and
        to copies of the weights. Nothing is replaced by nothing."""
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for frames, *seen in rows:
            counts[self._stack(frames)].update(dict(enumerate(seen)))
        self._db.executemany(
            "INSERT OR REPLACE INTO writing VALUES (?, ?, ?, ?)",
            [(stack, *(told[kind] for kind in range(3))) for stack, told in counts.items()],
        )

    def add_sites(self, sites: Iterable[tuple[str, str, int, str, int]]) -> None:
        """Replaces the counts of call sites: kind, file, line, function, calls."""
        sites = list(sites)
        self.add_sources(file for _, file, *_ in sites)
        self._db.executemany(
            "INSERT OR REPLACE INTO sites VALUES (?, CAST(? AS TEXT), ?, ?, ?)",
            [(kind, name_bytes(file), *rest) for kind, file, *rest in sites],
        )

    def add_sources(self, files: Iterable[str]) -> None:
        """Keeps the texts of source files as they are now: they may be edited before anybody looks."""
        for file in {*files} - self._sources:
            if len(self._sources) == MAX_SOURCES:
                continue
            self._sources.add(file)
            text = _text_of(file)
            if text:
                self._db.execute(
                    "INSERT OR IGNORE INTO sources VALUES (CAST(? AS TEXT), ?)",
                    (name_bytes(file), zlib.compress(text)),
                )

    def add_events(self, events: Iterable[tuple[int, int, str, Mapping[str, Any]]]) -> None:
        """Appends events: time, step, kind, detail."""
        self._db.executemany(
            "INSERT INTO events VALUES (?, ?, ?, ?)",
            [(time_ns, step, kind, json.dumps(detail)) for time_ns, step, kind, detail in events],
        )

    def add_worker(self, report: dict[str, Any]) -> None:
        """Replaces a DataLoader worker's totals and adds its sampled stacks."""
        for frames, weight in report.pop("stacks"):
            self._db.execute(
                "INSERT INTO worker_samples VALUES (?, ?) "
                "ON CONFLICT (stack) DO UPDATE SET weight_ns = weight_ns + excluded.weight_ns",
                (self._stack(frames), weight),
            )
        self._db.execute(
            "INSERT OR REPLACE INTO workers VALUES (?, ?)", (report["pid"], json.dumps(report))
        )

    def add_vitals(self, time_ns: int, step: int, readings: Mapping[str, int]) -> None:
        """Appends running totals of the operating system, as they stood at one instant."""
        self._db.execute(
            "INSERT OR IGNORE INTO vitals VALUES (?, ?, ?)", (time_ns, step, json.dumps(readings))
        )

    def set_meta(self, values: Mapping[str, Any]) -> None:
        """Sets what is known of the rank as a whole; values as JSON."""
        self._db.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)",
            [(key, json.dumps(value)) for key, value in values.items()],
        )

    def commit(self) -> None:
        """Makes everything added so far visible to readers, and safe from the death of this process.

        Where there is no write-ahead log, and somebody has been reading for longer than SQLite waits, the
        next commit does it.
        """
        try:
            self._db.commit()
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):
                raise
        else:
            self.safe_steps = self._steps

    def close(self) -> None:
        """Commits and closes the file, which then is one file: readers need no write-ahead log beside
        it. Unless one is reading at this moment: then the log stays, and nothing is lost."""
        self._db.commit()  # the last: a reader that outlasts it is an error
        self.safe_steps = self._steps
        self._db.execute(f"PRAGMA busy_timeout={LONGEST_WAIT_MS}")
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA journal_mode=DELETE")
        self._db.close()

    def discard(self) -> None:
        """Closes the file and removes it: a disk that took no step of it has room for a few words then."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        _remove(self.path)

    def _stack(self, frames: Frames) -> int:
        text = json.dumps(frames)
        known = self._stacks.get(text)
        if known is None:
            known = self._stacks[text] = len(self._stacks)
            self.add_sources(file for file, _, _ in frames[1:])
            self._db.execute("INSERT INTO stacks VALUES (?, ?)", (known, text))
        return known


def name_bytes(file: str) -> bytes:
    """Returns a file's name as the bytes that it has in the file system, which need not be UTF-8: SQLite
    refuses text with what Python has in their place."""
    return file.encode("utf-8", "surrogateescape")


def _free_name(folder: Path, stem: str) -> Path:
    own = f"{stem}.{os.getpid()}"  # which a process keeps that executes itself anew
    for name in chain((stem, own), (f"{own}.{number}" for number in count(2))):
        path = folder / f"{name}.sqlite"
        with contextlib.suppress(FileExistsError):
            path.touch(exist_ok=False)  # the name is taken, before another process of this rank looks
            return path
    raise AssertionError("unreachable")


def _remove(path: Path) -> None:
    for suffix in ("", "-wal", "-shm", "-journal"):
        with contextlib.suppress(OSError):
            path.with_name(path.name + suffix).unlink()


def _text_of(file: str) -> bytes:
    """Returns a source file, or what Python remembers of a notebook's cell, which is in none; empty where
    there is neither, and of what a program wrote."""
    try:
        text = Path(file).read_bytes() if os.path.getsize(file) <= MAX_SOURCE_BYTES else b""
    except (OSError, ValueError):
        text = "".join(linecache.getlines(file)).encode("utf-8", "surrogatepass")
    return text if len(text) <= MAX_SOURCE_BYTES else b""


def _open(path: Path) -> tuple[sqlite3.Connection, str]:
    """Opens with a write-ahead log, or without one where SQLite or the first real write shows that it does
    not work."""
    for journal in ("wal", "delete"):
        db = sqlite3.connect(path, isolation_level="DEFERRED")
        try:
            (used,) = db.execute(f"PRAGMA journal_mode={journal}").fetchone()
            db.execute("PRAGMA synchronous=NORMAL")
            db.executescript(SCHEMA)
            db.execute(f"PRAGMA user_version={VERSION}")
            db.commit()
        except sqlite3.OperationalError:
            db.close()
            if journal == "delete":
                raise
            path.write_bytes(b"")
        else:
            return db, str(used)
    raise AssertionError("unreachable")
