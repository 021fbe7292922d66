"""How a run lies on disk: the tables of a rank's file, and the packing of steps."""

from __future__ import annotations

import json
import sys
import zlib
from array import array
from collections.abc import Sequence

from diagnose.core.ledger import COLUMNS

VERSION = 1
"""`PRAGMA user_version` of a rank's file. A reader refuses what is newer than it knows."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (
    first_step INTEGER PRIMARY KEY, num_steps INTEGER NOT NULL, totals TEXT NOT NULL,
    columns BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS stacks (id INTEGER PRIMARY KEY, frames TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS samples (
    first_step INTEGER NOT NULL, slot INTEGER NOT NULL, stack INTEGER NOT NULL, weight_ns INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS sites (
    kind TEXT NOT NULL, file TEXT NOT NULL, line INTEGER NOT NULL, function TEXT NOT NULL,
    calls INTEGER NOT NULL, PRIMARY KEY (kind, file, line, function));
CREATE TABLE IF NOT EXISTS events (
    time_ns INTEGER NOT NULL, step INTEGER NOT NULL, kind TEXT NOT NULL, detail TEXT);
CREATE TABLE IF NOT EXISTS workers (pid INTEGER PRIMARY KEY, report TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vitals (
    time_ns INTEGER PRIMARY KEY, step INTEGER NOT NULL, readings TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS worker_samples (stack INTEGER PRIMARY KEY, weight_ns INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS standing (
    stack INTEGER PRIMARY KEY, passed_ns INTEGER NOT NULL, off_cpu_ns INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS writing (
    stack INTEGER PRIMARY KEY, looks INTEGER NOT NULL, gradients INTEGER NOT NULL, copies INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS device_chunks (
    first_step INTEGER PRIMARY KEY, num_steps INTEGER NOT NULL, columns BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sources (file TEXT PRIMARY KEY, text BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS meetings (first INTEGER PRIMARY KEY, times BLOB NOT NULL);
"""

_LEVEL = 1
"""Compression level: most slots are 0 in most steps, so the fastest level already takes off four fifths."""


def pack(rows: Sequence[tuple[int, ...]]) -> tuple[str, bytes]:
    """Packs the steps of one flush.

    Args:
        rows: Steps in the order of `core.ledger.COLUMNS`; at least one.

    Returns:
        The roll-up of the chunk as JSON (the sum of every column, but of `end_ns` the last), with which a
        long run can be drawn without unpacking it; and the columns one after the other as little-endian
        int64, compressed.
    """
    columns = list(zip(*rows, strict=True))
    assert len(columns) == len(COLUMNS)
    totals = [rows[-1][0], *map(sum, columns[1:])]
    return json.dumps(totals), pack_columns(columns)


def pack_columns(columns: Sequence[Sequence[int]]) -> bytes:
    """Packs columns one after the other as little-endian int64, compressed."""
    packed = array("q")
    for column in columns:
        packed.extend(column)
    if sys.byteorder == "big":
        packed.byteswap()
    return zlib.compress(packed.tobytes(), _LEVEL)
