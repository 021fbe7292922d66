"""Puts the small records of a long run together, so that a file grows with its steps and not with its age.

Every flush leaves a record of its own, of a single step where steps take long. Of a run of hours these are
tens of thousands, and reading each costs as much as reading hundreds of steps.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections import deque

TOGETHER = 32
"""Records that become one."""

LATEST = 64
"""Records that are left alone: who follows the file as it grows has not read them for certain."""

LARGE = 500
"""A record of so many rows costs its reader no more than they do."""


class Merging:
    """Merges the records of one table as they age. A merge is part of the commit in which it is made.

    Args:
        db: The file.
        table: The table: its key is the number of the first row in a record.
        blob: Its column of packed rows; see `format.pack_columns`.
        width: Columns of a row.
        beside: What else it has of a record: its `num_steps`, their `totals`.
    """

    def __init__(self, db: sqlite3.Connection, table: str, blob: str, width: int, *beside: str) -> None:
        self._db = db
        self._table = table
        self._blob = blob
        self._width = width
        self._beside = beside
        self._small: deque[tuple[int, int]] = deque()  # first row and number of rows of each

    def added(self, first: int, num_rows: int) -> None:
        """Takes note of a new record, behind all others; merges older ones when they are many."""
        self._small.append((first, num_rows))
        if len(self._small) < LATEST + TOGETHER:
            return
        chosen = [self._small.popleft()]
        rows = chosen[0][1]
        end = chosen[0][0] + rows
        while len(chosen) < TOGETHER and self._small[0][0] == end and rows + self._small[0][1] <= LARGE:
            chosen.append(self._small.popleft())
            rows += chosen[-1][1]
            end += chosen[-1][1]
        if len(chosen) > 1:
            self._merge([first for first, _ in chosen], [size for _, size in chosen])

    def _merge(self, firsts: list[int], sizes: list[int]) -> None:
        within = (firsts[0], firsts[-1])
        query = f"SELECT {self._blob} FROM {self._table} WHERE rowid BETWEEN ? AND ?"
        flat = [zlib.decompress(blob) for (blob,) in self._db.execute(query, within)]
        columns = b"".join(
            data[8 * size * column : 8 * size * (column + 1)]
            for column in range(self._width)
            for size, data in zip(sizes, flat, strict=True)
        )
        values: dict[str, object] = {self._blob: zlib.compress(columns)}
        if "num_steps" in self._beside:
            values["num_steps"] = sum(sizes)
        if "totals" in self._beside:
            query = f"SELECT totals FROM {self._table} WHERE rowid BETWEEN ? AND ?"
            totals = [json.loads(text) for (text,) in self._db.execute(query, within)]
            ended_ns, *others = zip(*totals, strict=True)
            values["totals"] = json.dumps([ended_ns[-1], *map(sum, others)])
        sets = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"DELETE FROM {self._table} WHERE rowid > ? AND rowid <= ?", within)
        self._db.execute(
            f"UPDATE {self._table} SET {sets} WHERE rowid = ?",
            (*values.values(), firsts[0]),
        )
