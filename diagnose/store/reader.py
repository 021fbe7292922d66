"""Reads what a run left on disk, whole or torn."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS, DEVICE_COLUMNS
from diagnose.store.format import VERSION
from diagnose.store.meta import read_only

Frame = tuple[str, int, str]
"""File, line, function."""

DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged file raises; the latter when SQLite quotes the damage in its own words."""

BAD_ROW = (ValueError, TypeError, LookupError, zlib.error)
"""What parsing a damaged row raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLog:
    """One rank's file, read.

    Attributes:
        path: The file.
        meta: What the rank said of itself.
        steps: int64 of shape `(steps, len(COLUMNS))`, in the order of `core.ledger.COLUMNS`.
        device_steps: Likewise by the device's clock, in the order of `DEVICE_COLUMNS`, for each of the
            steps; empty where there is no device. A step without a row there has holes.
        samples: First step of the bucket, slot and place (see `core.places`), stack, nanoseconds. A stack
            is the frame of an installed package, or one without a file, then the user's frames, innermost
            first.
        sites: Kind, file, line, function, calls.
        events: Time, step, kind, detail.
        workers: Running totals of each DataLoader worker.
        vitals: Time, step, and the operating system's running totals at that time, in order.
        worker_samples: Stack and nanoseconds, of all workers together.
        standing: Stack, nanoseconds between two samples in it, and those of them without a CPU.
        writing: Stack, how often it was looked at, and how often in the midst of writing to gradients, and
            to copies of the weights.
        meetings: int64 of shape `(passes, 2)`: when this rank's gradients of a backward pass were there,
            and when those of all ranks were, by `time.perf_counter_ns`. Empty where nothing was reduced.
        sources: Texts of the source files that were seen while it trained, as they were then, by name.
        notes: What could not be read, in words.
    """

    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    steps: npt.NDArray[np.int64]
    device_steps: npt.NDArray[np.int64] = field(
        default_factory=lambda: np.empty((0, len(DEVICE_COLUMNS)), dtype=np.int64)
    )
    samples: list[tuple[int, int, tuple[Frame, ...], int]] = field(default_factory=list)
    sites: list[tuple[str, str, int, str, int]] = field(default_factory=list)
    events: list[tuple[int, int, str, dict[str, Any]]] = field(default_factory=list)
    workers: list[dict[str, Any]] = field(default_factory=list)
    vitals: list[tuple[int, int, dict[str, int]]] = field(default_factory=list)
    worker_samples: list[tuple[tuple[Frame, ...], int]] = field(default_factory=list)
    standing: list[tuple[tuple[Frame, ...], int, int]] = field(default_factory=list)
    writing: list[tuple[tuple[Frame, ...], int, int, int]] = field(default_factory=list)
    meetings: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), dtype=np.int64))
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def training_vitals(self) -> list[tuple[int, int, dict[str, int]]]:
        """`vitals` up to the first at which all steps were done: what follows is of what the script does
        after its training."""
        last = max((step for _, step, _ in self.vitals), default=0)
        end = next((index for index, row in enumerate(self.vitals) if row[1] == last), 0)
        return self.vitals[: end + 1]


BRIEF_VITALS = 16
"""Readings of the operating system in a brief log: running totals lose nothing between two of them."""


def read_rank(path: Path, *, brief_from: int | None = None) -> RankLog:
    """Reads one rank's file; also while it is being written, and as far as it goes when it is torn.

    Args:
        path: The file.
        brief_from: Read what figures of the steps from this one on need, as for one rank of a thousand:
            equal stacks sampled from then on are one, and so are those before; a few readings of the
            operating system stand for all; nothing of the workers.

    Raises:
        DiagnoseError: If the file was written by a newer version.
    """
    with contextlib.closing(connect(path)) as db:
        tables = _Tables(db, path.name)
        rows = tables.rows
        tables.refuse_newer()
        stacks: dict[int, tuple[Frame, ...]] = dict(rows("SELECT id, frames FROM stacks", _stack))

        def stack_of(number: int) -> tuple[Frame, ...]:
            # Of a run under way: what was sampled since they were read may have brought new ones.
            if number not in stacks and number > (newest := max(stacks, default=0)):
                stacks.update(rows(f"SELECT id, frames FROM stacks WHERE id > {newest}", _stack))
            return stacks[number]

        def stacked(number: int, *values: int) -> tuple[Any, ...]:
            return stack_of(number), *map(int, values)

        meta = dict(rows("SELECT key, value FROM meta", lambda key, value: (key, json.loads(value))))
        steps = _steps(tables)
        is_brief = brief_from is not None
        return RankLog(
            path=path,
            meta=meta | meta.pop("state", {}),
            steps=steps,
            device_steps=_device_steps(tables, len(steps)),
            samples=rows(
                "SELECT * FROM samples" if brief_from is None else _brief_samples(db, brief_from),
                lambda first, slot, stack, weight: (int(first), int(slot), stack_of(stack), int(weight)),
            ),
            sites=rows("SELECT * FROM sites"),
            events=rows(
                "SELECT * FROM events",
                lambda time_ns, step, kind, detail: (time_ns, step, kind, json.loads(detail)),
            ),
            workers=[] if is_brief else rows("SELECT report FROM workers", json.loads),
            vitals=rows(
                "SELECT * FROM vitals" if brief_from is None else _brief_vitals(db, brief_from),
                lambda time_ns, step, readings: (time_ns, step, json.loads(readings)),
            ),
            worker_samples=[] if is_brief else rows("SELECT * FROM worker_samples", stacked),
            standing=[]
            if is_brief
            else tables.later_rows("SELECT stack, passed_ns, off_cpu_ns FROM standing", stacked),
            writing=[]
            if is_brief
            else tables.later_rows("SELECT stack, looks, gradients, copies FROM writing", stacked),
            meetings=_meetings(tables),
            sources=dict(tables.later_rows("SELECT file, text FROM sources", _source)),
            notes=tables.notes,
        )


def connect(path: Path) -> sqlite3.Connection:
    """Opens a rank's file for reading, also where nothing beside it can be written.

    Raises:
        sqlite3.DatabaseError: If there is no such file.
    """
    db = sqlite3.connect(read_only(path), uri=True, timeout=5)
    try:
        db.execute("SELECT count(*) FROM meta")
    except DAMAGE:
        # A write-ahead log needs a writable folder to be read; without one, read the file as it stands.
        db.close()
        db = sqlite3.connect(f"{read_only(path)}&immutable=1", uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    return db


class _Tables:
    """The tables of a rank's file, as far as they can be read.

    Args:
        db: The file.
        name: Its name.

    Attributes:
        notes: What could not be read, in words.
    """

    def __init__(self, db: sqlite3.Connection, name: str) -> None:
        self.notes: list[str] = []
        self._db = db
        self._name = name

    def rows(self, query: str, parse: Callable[..., Any] = lambda *row: row) -> list[Any]:
        """Runs a query and parses its rows; a damaged table gives the rows that can be read, and a note."""
        rows: list[Any] = []
        torn = 0
        table = _table_in(query)
        try:
            for row in self._db.execute(query):
                try:
                    rows.append(parse(*row))
                except BAD_ROW:
                    torn += 1
        except DAMAGE as error:
            self.notes.append(
                f"{self._name}: {table} is damaged ({error}); {len(rows)} rows of it were read."
            )
        if torn:
            self.notes.append(f"{self._name}: {table} is damaged; {torn} of its rows are left out.")
        return rows

    def later_rows(self, query: str, parse: Callable[..., Any]) -> list[Any]:
        """Likewise of a table that came later: files of before have none, and miss nothing."""
        if (_table_in(query),) not in self.rows("SELECT name FROM sqlite_master"):
            return []
        return self.rows(query, parse)

    def refuse_newer(self) -> None:
        """Raises a `DiagnoseError` if the file was written by a newer version."""
        version = self.rows("PRAGMA user_version")
        if version and version[0][0] > VERSION:
            raise DiagnoseError(
                f"{self._name}: written by a newer diagnose: format {version[0][0]}, not {VERSION}.\n"
                "Upgrade: pip install --upgrade torch-diagnose"
            )


def _table_in(query: str) -> str:
    return query.partition(" FROM ")[2].partition(" ")[0] or query


def _brief_samples(db: sqlite3.Connection, first_step: int) -> str:
    """Returns the query for samples in two buckets, before a step and from it on.

    In a run that ended before it, the last bucket matters by itself: there all are read.
    """
    after = f"SELECT 1 FROM samples WHERE first_step >= {first_step} LIMIT 1"
    with contextlib.suppress(*DAMAGE):
        if db.execute(after).fetchone():
            return (
                "SELECT min(first_step), slot, stack, sum(weight_ns) FROM samples "
                f"GROUP BY first_step >= {first_step}, slot, stack"
            )
    return "SELECT * FROM samples"


_TRAINED = "SELECT min(time_ns) FROM vitals WHERE step = (SELECT max(step) FROM vitals)"
"""When all steps were done, as `RankLog.training_vitals` has it."""


def _brief_vitals(db: sqlite3.Connection, first_step: int) -> str:
    """Returns the query for the first reading from a step on, the last, and some between them."""
    begin = f"SELECT time_ns FROM vitals WHERE step >= {first_step} ORDER BY time_ns LIMIT 1"
    try:
        ((first,),) = db.execute(begin).fetchall()
        ((last,),) = db.execute(_TRAINED).fetchall()
    except (ValueError, *DAMAGE):  # none that late, or none that can be read
        return "SELECT * FROM vitals LIMIT 0"
    spread = (first + part * (last - first) // BRIEF_VITALS for part in range(BRIEF_VITALS + 1))
    nearest = "(SELECT min(time_ns) FROM vitals WHERE time_ns >= {})"
    wanted = ", ".join(nearest.format(time_ns) for time_ns in spread)
    return f"SELECT * FROM vitals WHERE time_ns IN ({wanted})"


def _stack(key: int, text: str) -> tuple[int, tuple[Frame, ...]]:
    return key, _frames(text)


@functools.lru_cache(maxsize=4096)  # the ranks of a job run the same lines
def _frames(text: str) -> tuple[Frame, ...]:
    return tuple((str(file), int(line), str(function)) for file, line, function in json.loads(text))


def unpacked(packed: bytes, width: int, num_rows: int = -1) -> npt.NDArray[np.int64]:
    """Returns the rows whose columns `format.pack_columns` has packed, shape `(num_rows, width)`.

    Raises:
        zlib.error, ValueError: If they are damaged, or are not as many as they should be.
    """
    flat = np.frombuffer(zlib.decompress(packed), dtype="<i8")
    rows: npt.NDArray[np.int64] = flat.reshape(width, num_rows).T
    return rows


def _steps(tables: _Tables) -> npt.NDArray[np.int64]:
    # A scan is in the order of the integer primary key, the first step.
    chunks = tables.rows(
        "SELECT num_steps, columns FROM chunks",
        lambda num_steps, packed: unpacked(packed, len(COLUMNS), num_steps),
    )
    # Column by column in memory, as chunks are and as every analysis goes through it.
    none = np.empty((len(COLUMNS), 0), dtype=np.int64)
    steps: npt.NDArray[np.int64] = np.concatenate([none, *(rows.T for rows in chunks)], axis=1).T
    return steps


def _meetings(tables: _Tables) -> npt.NDArray[np.int64]:
    # In the order of its key, likewise.
    records = tables.later_rows("SELECT times FROM meetings", lambda packed: unpacked(packed, 2))
    return np.concatenate([*records, np.empty((0, 2), dtype=np.int64)])


def _source(file: str, packed: bytes) -> tuple[str, str]:
    return file, source_text(packed)


def source_text(packed: bytes) -> str:
    """Returns a kept source, with the ends of lines that it has where its file is read as text.

    Raises:
        zlib.error: If it is damaged.
    """
    return io.TextIOWrapper(io.BytesIO(zlib.decompress(packed)), "utf-8", errors="replace").read()


def _device_steps(tables: _Tables, num_steps: int) -> npt.NDArray[np.int64]:
    query = "SELECT first_step, num_steps, columns FROM device_chunks"
    chunks: list[tuple[int, npt.NDArray[np.int64]]] = tables.later_rows(query, _device_chunk)
    steps = np.zeros((num_steps if chunks else 0, len(DEVICE_COLUMNS)), dtype=np.int64)
    steps[:, DEVICE_COLUMNS.index("holes")] = 1
    for first, rows in chunks:
        end = min(first + len(rows), num_steps)
        steps[first:end] = rows[: max(0, end - first)]
    return steps


def _device_chunk(first: int, num_steps: int, packed: bytes) -> tuple[int, npt.NDArray[np.int64]]:
    if first < 0:
        raise ValueError(first)
    return int(first), unpacked(packed, len(DEVICE_COLUMNS), num_steps)
