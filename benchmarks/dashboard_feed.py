"""A run that is already long and goes on growing, for `dashboard.py`: written straight into the store.

    python benchmarks/dashboard_feed.py FOLDER STEPS RANKS

It prints a line once the steps are there, then adds some twice a second, as a job of 20 ms a step would,
until it is ended.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

import numpy as np

from diagnose.core.ledger import COLUMNS, COUNTS, SLOT_OF
from diagnose.store.writer import Writer

USUAL_MS = {"data_wait": 2, "forward": 5, "backward": 9, "communication": 1, "optimizer": 3}
STEP_MS = sum(USUAL_MS.values())
STEPS_PER_FLUSH = 500 // STEP_MS
CHUNK = 500


def rows(first: int, count: int, rank: int) -> list[tuple[int, ...]]:
    """Steps with the scatter of a real job; rank 5 is late."""
    made = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    draw = np.random.default_rng((first, rank))
    for name, ms in USUAL_MS.items():
        longer = 1.3 if rank == 5 and name == "forward" else 1.0
        made[:, len(COUNTS) + SLOT_OF[name]] = ms * longer * 1e6 * draw.lognormal(0, 0.1, count)
    made[:, COLUMNS.index("samples")] = 32
    made[:, 0] = (first + np.arange(1, count + 1)) * STEP_MS * 1_000_000
    return [tuple(row) for row in made.tolist()]


def main() -> None:
    folder, steps, ranks = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True)
    facts = {"host": socket.gethostname(), "pid": os.getpid()}
    manifest = {"id": folder.name, "script": "train.py", "argv": [], "started_unix": time.time(), **facts}
    writers = [Writer(folder, rank) for rank in range(ranks)]
    for rank, writer in enumerate(writers):
        writer.set_meta({"rank": rank, "world_size": ranks, **facts})
        for first in range(0, steps, CHUNK):
            writer.add_steps(rows(first, min(CHUNK, steps - first), rank))
        writer.commit()
    (folder / "run.json").write_text(json.dumps(manifest))
    print("written", flush=True)
    written = steps
    while True:
        time.sleep(0.5)
        for rank, writer in enumerate(writers):
            writer.add_steps(rows(written, STEPS_PER_FLUSH, rank))
            now_ns = (written + STEPS_PER_FLUSH) * STEP_MS * 1_000_000
            readings = {"cpu_ns": now_ns, "resident_bytes": 1 << 30, "machine_busy_ns": 2 * now_ns}
            writer.add_vitals(now_ns, written, readings)
            writer.set_meta({"state": {"updated_unix": time.time(), "steps": written}})
            writer.commit()
        written += STEPS_PER_FLUSH


if __name__ == "__main__":
    main()
