"""Files of a run as the writer leaves them, with steps that tell their number."""

from __future__ import annotations

from pathlib import Path

from diagnose.core.ledger import COLUMNS
from diagnose.store.writer import Writer

STACK = [("", 0, ""), ("/home/me/train.py", 12, "main"), ("/home/me/train.py", 40, "<module>")]

WORKER = {
    "pid": 7,
    "worker": 0,
    "batches": 2,
    "fetch_ns": 100,
    "collate_ns": 10,
    "cpu_ns": 50,
    "rest_cpu_ns": 5,
    "life_ns": 1000,
}


def rows(first: int, count: int) -> list[tuple[int, ...]]:
    """Steps that hold the number of each in every column."""
    return [
        tuple(1000 * step + column for column in range(len(COLUMNS)))
        for step in range(first, first + count)
    ]


def whole_file(folder: Path) -> Path:
    """A file that holds something of everything."""
    writer = Writer(folder, 0)
    for first in range(0, 1000, 100):
        writer.add_steps(rows(first, 100))
        writer.add_samples(first, [(2, [("", 0, ""), (f"/home/me/{first}.py", 1, "f")], 5), (3, STACK, 7)])
        writer.commit()
    writer.add_sites([("forward", "/home/me/train.py", 12, "main", 900)])
    writer.add_sites([("forward", "/home/me/train.py", 12, "main", 1000)])
    writer.add_events([(123, 4, "checkpoint", {}), (456, 5, "gc", {"collected": 6})])
    writer.add_worker({"stacks": [[STACK, 3]], **WORKER, "batches": 1})
    writer.add_worker({"stacks": [[STACK, 4]], **WORKER})
    writer.set_meta({"rank": 0, "host": "here"})
    writer.set_meta({"state": {"steps": 1000, "finished": True}})
    writer.close()
    return writer.path
