"""A run that is already long and goes on growing, for `dashboard.py`: written straight into the store.

    python benchmarks/dashboard_feed.py FOLDER STEPS RANKS [--others 499]

Its ranks wait in every step for one that is late. The first one was tuned, keeps a loss, and has a device.
A few ranks are written step by step; the others are copies of them. A line is printed once the steps are
there; then every rank's file gets some twice a second, as from a job of 20 ms a step, until this is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import sqlite3
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.finding import Gain
from diagnose.core.history import LOSS
from diagnose.core.ledger import COLUMNS, COUNTS, RECORDER, SLOT_OF
from diagnose.core.trial import Measured, Outcome, Safety, Trial
from diagnose.store.format import pack, pack_columns
from diagnose.store.writer import Writer

USUAL_MS = {"data_wait": 2.2, "forward": 5, "backward": 8, "optimizer": 3}
"""One rank's own work. It waits for the others between the last two."""

STEP_MS = 20
SCATTER = 0.05
LATE_RANK, LATE_MS = 5, 1.5
LEAST_WAIT_MS = 0.1
FLUSH_EVERY_S = 0.5
STEPS_PER_FLUSH = int(1000 * FLUSH_EVERY_S) // STEP_MS
CHUNK = 500
"""Steps in one record of the history, as they are when the store has merged them."""

VARIANTS = 4
"""Ranks with steps of their own, beside the late one."""

MARKS = 120
"""Events that a chart may mark; it shows 100 at most."""

LOSS_POINTS = 256
NICENESS = 10
"""The other ranks of a large job are not on this machine: writing them must not take what is measured."""

Rows = npt.NDArray[np.int64]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--others", type=int, default=0, help="short runs beside it that have ended")
    args = parser.parse_args()
    os.nice(NICENESS)
    begin(args.folder, args.steps, args.ranks)
    if args.others:
        end_beside(args.folder.parent, args.others)
    # Every file that grows is three: SQLite's, its log, and the index of that.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    files = [opened(args.folder, rank, args.steps) for rank in range(args.ranks)]
    print("written", flush=True)
    written, due = args.steps, time.monotonic()
    while True:
        due = max(due + FLUSH_EVERY_S, time.monotonic())
        time.sleep(max(0.0, due - time.monotonic()))
        written = grow(files, written)


def begin(folder: Path, steps: int, ranks: int) -> None:
    """Writes the run as it stands so far; its script is a file beside the runs."""
    script = folder.parent / "train.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("\n".join(f"step_{number}()" for number in range(1, 60)))
    folder.mkdir()
    written = {*range(VARIANTS), LATE_RANK} & {*range(ranks)}
    for rank in written:
        write(folder, steps, rank, ranks, str(script))
    for rank in {*range(ranks)} - written:
        shutil.copyfile(file_of(folder, rank % VARIANTS), file_of(folder, rank))
    manifest = {
        "id": folder.name,
        "script": script.name,
        "argv": ["--lr", "0.1"],
        "cwd": str(script.parent),
        "started": "2026-11-22T10:00:00+00:00",
        "started_unix": time.time(),
        **own_facts(),
    }
    (folder / "run.json").write_text(json.dumps(manifest))


def write(folder: Path, steps: int, rank: int, ranks: int, script: str) -> None:
    """Writes one rank's file as its job would have, and closes it."""
    writer = Writer(folder, rank)
    facts = {"rank": rank, "world_size": ranks, "takes_commands": True, "recorder": RECORDER, **own_facts()}
    writer.set_meta({**facts, "columns": COLUMNS})
    for first in range(0, steps, CHUNK):
        count = min(CHUNK, steps - first)
        rows, meetings = trained(first, count, rank, ranks)
        writer.add_steps(rows.tolist())  # type: ignore[arg-type]
        writer.add_meetings(meetings.tolist())  # type: ignore[arg-type]
        for flush in range(first + STEPS_PER_FLUSH, first + count + 1, STEPS_PER_FLUSH):
            writer.add_vitals(flush * STEP_MS * 1_000_000, flush, readings(flush))
        slot = SLOT_OF["data_wait"]
        writer.add_samples(first, [(slot, [("", 0, ""), (script, 41, "main")], 100_000_000)])
    if rank == 0:
        writer.add_events(marked(steps))
    writer.set_meta({"state": state(steps)})
    writer.close()


def trained(first: int, count: int, rank: int, ranks: int) -> tuple[Rows, Rows]:
    """Returns steps with the scatter of a real job, and when the rank's gradients and those of all came."""
    draw = np.random.default_rng((first, rank))
    times_ms = {name: ms * draw.lognormal(0, SCATTER, count) for name, ms in USUAL_MS.items()}
    if rank == LATE_RANK:
        times_ms["data_wait"] += LATE_MS
    waited_ms = np.maximum(LEAST_WAIT_MS, STEP_MS - sum(times_ms.values()))
    times_ms["communication" if ranks > 1 else "gap_after_optimizer"] = waited_ms
    rows = np.zeros((count, len(COLUMNS)), dtype=np.int64)
    for name, each_ms in times_ms.items():
        rows[:, len(COUNTS) + SLOT_OF[name]] = each_ms * 1e6
    rows[:, COLUMNS.index("samples")] = 32
    rows[:, COLUMNS.index("backward_passes")] = 1
    rows[:, 0] = (first + np.arange(1, count + 1)) * STEP_MS * 1_000_000
    if ranks == 1:
        return rows, np.zeros((0, 2), dtype=np.int64)
    met = rows[:, 0] - rows[:, len(COUNTS) + SLOT_OF["optimizer"]]
    return rows, np.stack([met - (waited_ms * 1e6).astype(np.int64), met], axis=1)


def readings(step: int) -> dict[str, Any]:
    """Returns what the operating system and the driver said after so many steps."""
    now_ns = step * STEP_MS * 1_000_000
    device = {
        "time_ns": now_ns,
        "busy_share": 0.9,
        "sm_hz": 1.2e9,
        "power_w": 300.0,
        "power_limit_w": 400.0,
    }
    return {
        "cpu_ns": now_ns,
        "child_cpu_ns": now_ns // 2,
        "resident_bytes": (1 << 30) + step * 1000,
        "machine_busy_ns": 2 * now_ns,
        "allocator": {"allocated_bytes": 5 << 30, "reserved_bytes": 8 << 30},
        "device": device,
    }


def marked(steps: int) -> list[tuple[int, int, str, dict[str, Any]]]:
    """Returns what tuning and commands did, spread over the steps."""
    won = Measured(speedup=1.2, low=1.1, high=1.3, pairs=12, detectable=1.05, without_ns=24e6, with_ns=20e6)
    details: list[tuple[str, dict[str, Any]]] = [("tuning", {"state": "observing"}), ("diagnosed", {})]
    details.append(("tuning", {"state": "trying"}))
    for number in range(12):
        trial = Trial(
            action=f"fix-number-{number}",
            safety=Safety.EXACT,
            outcome=Outcome.KEPT if number % 4 == 0 else Outcome.REVERTED,
            reason="" if number % 4 == 0 else "no faster",
            predicted=Gain(speedup=1.3, low=1.1, high=1.5),
            measured=won,
            first_step=steps * number // MARKS,
            steps_spent=100,
        )
        details.append(("trial", trial.as_record()))
    details.append(("confirmation", asdict(won)))
    details.append(("tuning", {"state": "holding"}))
    for number in range(MARKS - len(details)):
        command = "resume-tuning" if number % 2 else "pause-tuning"
        details.append(("command", {"command": command, "argument": "", "state": "done", "reason": ""}))
    placed = []
    for number, (kind, detail) in enumerate(details):
        step = steps * (number + 1) // (len(details) + 1)
        placed.append((step * STEP_MS * 1_000_000, step, kind, {**detail, **at(kind, step)}))
    return placed


def at(kind: str, step: int) -> dict[str, int]:
    """Returns the step as some events repeat it."""
    return {"step": step} if kind == "tuning" else {}


def state(steps: int, *, first: bool = True) -> dict[str, Any]:
    """Returns what a rank says of itself with every flush."""
    said: dict[str, Any] = {"updated_unix": time.time(), "steps": steps}
    if not first:
        return said
    width = 1
    while steps > LOSS_POINTS * width:
        width *= 2
    means = np.geomspace(2.3, 0.1, max(1, steps // width)).round(6).tolist()
    return {**said, LOSS: {"width": width, "means": means}, "facts": {"nvml": {"max_sm_hz": 1.4e9}}}


def own_facts() -> dict[str, Any]:
    """Returns which process writes the run: as long as it lives, the run goes on."""
    return {"host": socket.gethostname(), "pid": os.getpid()}


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.sqlite"


def opened(folder: Path, rank: int, steps: int) -> sqlite3.Connection:
    """Opens a rank's file to be written on."""
    db = sqlite3.connect(file_of(folder, rank), isolation_level="DEFERRED")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=NORMAL")
    db.execute("UPDATE meta SET value = ? WHERE key = 'rank'", (json.dumps(rank),))
    said = json.dumps(state(steps, first=rank == 0))
    db.execute("UPDATE meta SET value = ? WHERE key = 'state'", (said,))
    db.commit()
    return db


def grow(files: list[sqlite3.Connection], written: int) -> int:
    """Adds a flush to every rank's file; returns how many steps there are then."""
    packed: dict[int, tuple[str, bytes, bytes]] = {}
    end = written + STEPS_PER_FLUSH
    for rank, db in enumerate(files):
        variant = rank if rank == LATE_RANK else rank % VARIANTS
        if variant not in packed:
            rows, meetings = trained(written, STEPS_PER_FLUSH, variant, len(files))
            totals, columns = pack(rows.tolist())  # type: ignore[arg-type]
            packed[variant] = (totals, columns, pack_columns(meetings.T.tolist()))
        totals, columns, times = packed[variant]
        db.execute("INSERT INTO chunks VALUES (?, ?, ?, ?)", (written, STEPS_PER_FLUSH, totals, columns))
        if len(files) > 1:
            db.execute("INSERT INTO meetings VALUES (?, ?)", (written, times))
        if rank == 0:
            values = (end * STEP_MS * 1_000_000, end, json.dumps(readings(end)))
            db.execute("INSERT INTO vitals VALUES (?, ?, ?)", values)
        said = json.dumps(state(end, first=rank == 0))
        db.execute("UPDATE meta SET value = ? WHERE key = 'state'", (said,))
        db.commit()
    return end


def end_beside(root: Path, count: int) -> None:
    """Writes runs that have ended, all of them older."""
    steps, begun = 400, time.time() - 3600
    one = root / "ended-0"
    one.mkdir()
    write(one, steps, 0, 1, str(root / "train.py"))
    for number in range(count):
        folder = root / f"ended-{number}"
        if number:
            folder.mkdir()
            shutil.copyfile(file_of(one, 0), file_of(folder, 0))
        manifest = {
            "id": folder.name,
            "script": "train.py",
            "argv": ["--seed", str(number)],
            "started": "2026-11-21T10:00:00+00:00",
            "started_unix": begun - number,
            "ended_unix": begun + 60,
            "exit_code": 0,
        }
        (folder / "run.json").write_text(json.dumps(manifest))


if __name__ == "__main__":
    main()
