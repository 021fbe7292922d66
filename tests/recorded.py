"""Runs written straight into the store, for tests of what reads them: of any length, with any damage."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.core.ledger import COLUMNS, COUNTS, SLOT_OF
from diagnose.store.writer import Writer

MS = 1_000_000
USUAL_MS = {"data_wait": 3.0, "forward": 10.0, "backward": 20.0, "optimizer": 4.0, "gap_after_rest": 1.0}
BATCH = 32


def manifest(folder: Path, **facts: Any) -> Path:
    """Makes a run's folder, of a run that has ended well unless `facts` say otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    known = {
        "schema": 1,
        "id": folder.name,
        "script": "train.py",
        "argv": ["--lr", "0.1"],
        "cwd": "/jobs",
        "host": "somewhere",
        "started": "2026-11-21T10:00:00+00:00",
        "started_unix": now - 60,
        "ended_unix": now,
        "exit_code": 0,
        "signal": None,
        "warmup": 0,
        "notes": [],
    }
    (folder / "run.json").write_text(json.dumps({**known, **facts}), encoding="utf-8")
    return folder


def steps(
    first: int, count: int, slots_ms: Mapping[str, float] = USUAL_MS, spread: float = 0.1, seed: int = 0
) -> list[tuple[int, ...]]:
    """Steps as the recorder hands them over; the same step is the same whoever asks for it."""
    rows = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    for name, ms in slots_ms.items():
        scatter = np.random.default_rng((seed, first, SLOT_OF[name])).lognormal(0, spread, count)
        rows[:, len(COUNTS) + SLOT_OF[name]] = (ms * MS * scatter).astype(np.int64)
    rows[:, COLUMNS.index("samples")] = BATCH
    rows[:, 0] = (first + np.arange(1, count + 1)) * int(sum(slots_ms.values()) * MS)
    return [tuple(row) for row in rows.tolist()]


def writer(folder: Path, rank: int = 0, restart: int = 0, **facts: Any) -> Writer:
    """A rank's file, open for writing."""
    opened = Writer(folder, rank, restart)
    opened.set_meta({"rank": rank, "world_size": 1, "host": "somewhere", "pid": 2**22 + rank, **facts})
    opened.commit()
    return opened


def record(
    folder: Path,
    num_steps: int,
    *,
    rank: int = 0,
    per_flush: int = 500,
    slots_ms: Mapping[str, float] = USUAL_MS,
    events: Sequence[tuple[int, int, str, Mapping[str, Any]]] = (),
    **facts: Any,
) -> None:
    """Writes a rank's file and closes it."""
    file = writer(folder, rank, **facts)
    for first in range(0, num_steps, per_flush):
        file.add_steps(steps(first, min(per_flush, num_steps - first), slots_ms, seed=rank))
    file.add_events(events)
    end_ns = int(num_steps * sum(slots_ms.values()) * MS)
    for part in range(20):
        time_ns = end_ns * (part + 1) // 20
        readings = {"cpu_ns": time_ns, "resident_bytes": 1 << 30, "machine_busy_ns": 2 * time_ns}
        file.add_vitals(time_ns, num_steps * part // 20, readings)
    file.set_meta({"state": {"steps": num_steps, "updated_unix": time.time(), "finished": True}})
    file.close()
