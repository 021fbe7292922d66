"""A range of steps, read for one call: what a reader zooms into, or a link leads to."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from diagnose.dashboards._bins import MAX_BINS, Bins

from diagnose.store.reader import BAD_ROW
from diagnose.store.tail import MAX_CHUNKS, Chunk, look


def bins_between(paths: Sequence[Path], first: int, last: int) -> list[Bins]:
    """Returns the steps of each rank from `first` to before `last`, in bins that are alike.

    Args:
        paths: The ranks' files; one that cannot be read gives empty bins.
        first: The first step.
        last: The first that is not wanted.
    """
    first, last = max(0, first), max(0, first, last)
    width = 1
    while (last - 1) // width - first // width + 1 > MAX_BINS:
        width *= 2
    start = first // width * width
    found = []
    for path in paths:
        bins = Bins(start, width)
        with contextlib.suppress(sqlite3.DatabaseError, ValueError, OSError):
            _read(path, bins, first, last)
        found.append(bins)
    return found


def _read(path: Path, bins: Bins, first: int, last: int) -> None:
    begin: int | None = None
    while begin is None or begin < last:
        with look(path) as file:
            begin = file.begin_of(first) if begin is None else begin
            chunks = file.chunks_from(begin)
        for chunk in chunks:
            if chunk.first < last:
                _add(bins, chunk, first, last)
        if len(chunks) < MAX_CHUNKS:
            return
        begin = chunks[-1].first + 1


def _add(bins: Bins, chunk: Chunk, first: int, last: int) -> None:
    if first <= chunk.first and chunk.first + chunk.num_steps <= last:
        bins.add(chunk, one_by_one=False)
        return
    begin, end = max(first - chunk.first, 0), min(last - chunk.first, chunk.num_steps)
    if begin < end:
        with contextlib.suppress(*BAD_ROW):
            bins.add_rows(chunk.first + begin, chunk.rows()[begin:end])
