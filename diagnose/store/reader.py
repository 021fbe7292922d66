"""Reads what a run left on disk, whole or torn."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from diagnose.core.errors import DiagnoseError
from diagnose.core.ledger import COLUMNS, DEVICE_COLUMNS
from diagnose.store.format import VERSION

Frame = tuple[str, int, str]
"""File, line, function."""

DAMAGE = (sqlite3.DatabaseError, UnicodeDecodeError)
"""What reading a damaged file raises; the latter when SQLite quotes the damage in its own words."""


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
    notes: list[str] = []
    db = connect(path)
    try:
        version = _rows(db, "PRAGMA user_version", path, notes)
        if version and version[0][0] > VERSION:
            raise DiagnoseError(
                f"{path.name}: written by a newer diagnose: format {version[0][0]}, not {VERSION}.\n"
                "Upgrade: pip install --upgrade torch-diagnose"
            )
        stacks: dict[int, tuple[Frame, ...]] = dict(
            _rows(db, "SELECT id, frames FROM stacks", path, notes, _stack)
        )

        def stack_of(number: int) -> tuple[Frame, ...]:
            # Of a run under way: what was sampled since they were read may have brought new ones.
            if number not in stacks and number > (newest := max(stacks, default=0)):
                newer = f"SELECT id, frames FROM stacks WHERE id > {newest}"
                stacks.update(_rows(db, newer, path, notes, _stack))
            return stacks[number]

        meta = dict(_rows(db, "SELECT key, value FROM meta", path, notes, lambda k, v: (k, json.loads(v))))
        # A scan is in the order of the integer primary key, the first step.
        steps = _steps(_rows(db, "SELECT num_steps, columns FROM chunks", path, notes, _chunk))
        return RankLog(
            path=path,
            meta=meta | meta.pop("state", {}),
            steps=steps,
            device_steps=_device_steps(db, path, notes, len(steps)),
            samples=_rows(
                db,
                "SELECT * FROM samples" if brief_from is None else _brief_samples(db, brief_from),
                path,
                notes,
                lambda first, slot, stack, weight: (int(first), int(slot), stack_of(stack), int(weight)),
            ),
            sites=_rows(db, "SELECT * FROM sites", path, notes),
            events=_rows(
                db,
                "SELECT * FROM events",
                path,
                notes,
                lambda time_ns, step, kind, detail: (time_ns, step, kind, json.loads(detail)),
            ),
            workers=_rows(db, "SELECT report FROM workers", path, notes, json.loads)
            if brief_from is None
            else [],
            vitals=_rows(
                db,
                "SELECT * FROM vitals" if brief_from is None else _brief_vitals(db, brief_from),
                path,
                notes,
                lambda time_ns, step, readings: (time_ns, step, json.loads(readings)),
            ),
            worker_samples=_rows(
                db,
                "SELECT * FROM worker_samples",
                path,
                notes,
                lambda stack, weight: (stack_of(stack), int(weight)),
            )
            if brief_from is None
            else [],
            standing=_standing(db, path, notes, stack_of) if brief_from is None else [],
            meetings=_meetings(db, path, notes),
            sources=_sources(db, path, notes),
            notes=notes,
        )
    finally:
        db.close()


def connect(path: Path) -> sqlite3.Connection:
    """Opens a rank's file for reading, also where nothing beside it can be written.

    Raises:
        sqlite3.DatabaseError: If there is no such file.
    """
    address = f"file:{quote(os.fsencode(path.absolute()))}"
    db = sqlite3.connect(f"{address}?mode=ro", uri=True, timeout=5)
    try:
        db.execute("SELECT count(*) FROM meta")
    except DAMAGE:
        # A write-ahead log needs a writable folder to be read; without one, read the file as it stands.
        db.close()
        db = sqlite3.connect(f"{address}?mode=ro&immutable=1", uri=True)
    db.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    return db


def _rows(
    db: sqlite3.Connection,
    query: str,
    path: Path,
    notes: list[str],
    parse: Callable[..., Any] = lambda *row: row,
) -> list[Any]:
    """Runs a query and parses its rows; a damaged table gives the rows that can be read, and a note."""
    rows: list[Any] = []
    torn = 0
    table = query.partition(" FROM ")[2].partition(" ")[0] or query
    try:
        for row in db.execute(query):
            try:
                rows.append(parse(*row))
            except (ValueError, TypeError, LookupError, zlib.error):
                torn += 1
    except DAMAGE as error:
        notes.append(f"{path.name}: {table} is damaged ({error}); {len(rows)} rows of it were read.")
    if torn:
        notes.append(f"{path.name}: {table} is damaged; {torn} of its rows are left out.")
    return rows


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


def _chunk(num_steps: int, blob: bytes) -> npt.NDArray[np.int64]:
    return np.frombuffer(zlib.decompress(blob), dtype="<i8").reshape(len(COLUMNS), num_steps)


def _has_table(db: sqlite3.Connection, table: str, path: Path, notes: list[str]) -> bool:
    """Files of before there was such a table have none, and miss nothing."""
    return (table,) in _rows(db, "SELECT name FROM sqlite_master", path, notes)


def _standing(
    db: sqlite3.Connection, path: Path, notes: list[str], stack_of: Callable[[int], tuple[Frame, ...]]
) -> list[tuple[tuple[Frame, ...], int, int]]:
    if not _has_table(db, "standing", path, notes):
        return []
    query = "SELECT stack, passed_ns, off_cpu_ns FROM standing"
    return _rows(db, query, path, notes, lambda stack, *ns: (stack_of(stack), *map(int, ns)))


def _meetings(db: sqlite3.Connection, path: Path, notes: list[str]) -> npt.NDArray[np.int64]:
    if not _has_table(db, "meetings", path, notes):
        return np.empty((0, 2), dtype=np.int64)
    blobs = _rows(db, "SELECT times FROM meetings", path, notes, _times)  # in the order of its key
    return np.concatenate([*blobs, np.empty((0, 2), dtype=np.int64)])


def _sources(db: sqlite3.Connection, path: Path, notes: list[str]) -> dict[str, str]:
    if not _has_table(db, "sources", path, notes):
        return {}
    return dict(_rows(db, "SELECT file, text FROM sources", path, notes, _source))


def _source(file: str, text: bytes) -> tuple[str, str]:
    return file, source_text(text)


def source_text(packed: bytes) -> str:
    """Returns a kept source, with the ends of lines that it has where its file is read as text.

    Raises:
        zlib.error: If it is damaged.
    """
    return io.TextIOWrapper(io.BytesIO(zlib.decompress(packed)), "utf-8", errors="replace").read()


def _device_steps(
    db: sqlite3.Connection, path: Path, notes: list[str], num_steps: int
) -> npt.NDArray[np.int64]:
    width = len(DEVICE_COLUMNS)
    chunks: list[tuple[int, npt.NDArray[np.int64]]] = []
    if _has_table(db, "device_chunks", path, notes):
        query = "SELECT first_step, num_steps, columns FROM device_chunks"
        chunks = _rows(db, query, path, notes, _device_chunk)
    steps = np.zeros((num_steps if chunks else 0, width), dtype=np.int64)
    steps[:, DEVICE_COLUMNS.index("holes")] = 1
    for first, rows in chunks:
        end = min(first + len(rows), num_steps)
        steps[first:end] = rows[: max(0, end - first)]
    return steps


def _device_chunk(first: int, num_steps: int, blob: bytes) -> tuple[int, npt.NDArray[np.int64]]:
    if first < 0:
        raise ValueError(first)
    flat: npt.NDArray[np.int64] = np.frombuffer(zlib.decompress(blob), dtype="<i8")
    return int(first), flat.reshape(len(DEVICE_COLUMNS), num_steps).T


def _times(blob: bytes) -> npt.NDArray[np.int64]:
    times: npt.NDArray[np.int64] = np.frombuffer(zlib.decompress(blob), dtype="<i8").reshape(2, -1).T
    return times


def _steps(chunks: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    # Column by column in memory, as chunks are and as every analysis goes through it.
    none = np.empty((len(COLUMNS), 0), dtype=np.int64)
    steps: npt.NDArray[np.int64] = np.concatenate([none, *chunks], axis=1).T
    return steps
