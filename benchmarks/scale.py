"""What a large job costs: the reading of its run folder, and what its ranks ask of the file system.

    python benchmarks/scale.py [--shape RANKSxSTEPS ...] [--step-ms 250] [--keep DIR] [--markdown PATH]

A folder is made through the store's own writer, so that it is of today's format: what a real run of two
gloo ranks recorded (its stacks, facts and readings) with the steps of a large one. The ranks have scatter
of their own; one of them reads its data slowly, and all the others wait for it in their backward pass. Its
report must name it: no row of the table is printed without.

Time and memory are those of `diagnose report --json`, all its processes together, every page they share
counted as often as it is mapped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS, COUNTS, SLOT_OF
from diagnose.store.reader import RankLog, read_rank
from diagnose.store.writer import Writer

JOB = Path(__file__).parent / "accuracy" / "tuning" / "two_ranks.py"
SHAPES = ("64x10000", "256x10000", "1024x10000", "64x100000", "1x1000000")
RANKS_PER_HOST = 8

USUAL_SHARES = {"data_wait": 0.04, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}
"""Parts of a step; the rest is the gap before the next."""

SCATTER = 0.05
LATE_SHARE = 0.2
"""So much of a step longer takes the straggler's data."""

VARIANTS = 32
"""Ranks with steps of their own; further ones are copies of these with another number."""

COMMIT_EVERY = 200
"""Flushes. The job commits each; the file is the same."""

FLUSH_EVERY_MS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A job.

    Attributes:
        step_ms: How long a step takes: the shorter, the more of them are in one record of the store.
    """

    ranks: int
    steps: int
    step_ms: float

    @property
    def straggler(self) -> int:
        """The rank that is late."""
        return self.ranks * 2 // 3

    @property
    def steps_per_flush(self) -> int:
        """Steps in one record."""
        return min(500, max(1, round(FLUSH_EVERY_MS / self.step_ms)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a report took, of all its processes."""

    wall_s: float
    cpu_s: float
    peak_bytes: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="RANKSxSTEPS")
    parser.add_argument("--step-ms", type=float, default=250.0)
    parser.add_argument("--torn", type=int, default=0, help="ranks whose file ends in the middle")
    parser.add_argument("--missing", type=int, default=0, help="ranks whose file is not there")
    parser.add_argument("--keep", type=Path, help="make the folders there, and leave them")
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    args = parser.parse_args()
    lines = [
        f"Measured on {date.today()}: {platform.machine()}, {len(os.sched_getaffinity(0))} CPUs, Python"
        f" {platform.python_version()}, load average {os.getloadavg()[0]:.1f} at the start; steps of"
        f" {args.step_ms:g} ms. Printed by `benchmarks/scale.py`.",
        "",
        "| ranks | steps | folder (MB) | report (s) | CPU (s) | memory (MB) | named |",
        "|---:|---:|---:|---:|---:|---:|---|",
    ]
    with tempfile.TemporaryDirectory(dir=args.keep) as scratch:
        template = recorded(Path(scratch))
        for text in args.shape:
            ranks, steps = map(int, text.split("x"))
            shape = Shape(ranks=ranks, steps=steps, step_ms=args.step_ms)
            folder = (args.keep or Path(scratch)) / f"{text}-{args.step_ms:g}ms"
            begun = time.perf_counter()
            if not folder.exists():
                make(folder, shape, template)
                spoil(folder, shape, args.torn, args.missing)
            print(f"{folder.name}: made in {time.perf_counter() - begun:.0f} s", file=sys.stderr)
            lines.append(row(folder, shape))
            print(lines[-1], file=sys.stderr)
            if not args.keep:
                shutil.rmtree(folder)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def recorded(root: Path) -> RankLog:
    """Records a short real run of two ranks; returns the first's records."""
    command = [sys.executable, "-m", "diagnose", "run", "--quiet", "--run-dir", str(root), "--name", "real"]
    subprocess.run([*command, "--nproc-per-node", "2", str(JOB), "--steps", "200"], check=True)
    return read_rank(root / "real" / "rank0.sqlite")


def make(folder: Path, shape: Shape, template: RankLog) -> None:
    """Makes the folder of a run that ended."""
    folder.mkdir(parents=True)
    now = time.time()
    manifest = {
        "schema": 1,
        "id": folder.name,
        "script": JOB.name,
        "argv": [],
        "started_unix": now - shape.steps * shape.step_ms / 1000,
        "ended_unix": now,
        "exit_code": 0,
    }
    late = {shape.straggler} if shape.ranks > 1 else set()
    written = sorted({*range(min(VARIANTS, shape.ranks)), *late})
    with ProcessPoolExecutor() as processes:
        list(processes.map(partial(write, folder, shape, template), written))
        copies = [rank for rank in range(shape.ranks) if rank not in written]
        list(processes.map(partial(copy, folder), copies, chunksize=16))
    (folder / "run.json").write_text(json.dumps(manifest), encoding="utf-8")


def write(folder: Path, shape: Shape, template: RankLog, rank: int) -> None:
    """Writes one rank's file as the flusher of a job would have."""
    writer = Writer(folder, rank)
    meta = {key: value for key, value in template.meta.items() if key not in ("rank", "host", "world_size")}
    writer.set_meta({**meta, **place(rank), "world_size": shape.ranks, "finished": True})
    writer.add_sites(template.sites)
    rows = steps_of(shape, rank)
    each = shape.steps_per_flush
    stacks = [(slot, frames, weight) for _, slot, frames, weight in template.samples[-8:]]
    _, _, readings = template.vitals[-1]
    for number, first in enumerate(range(0, shape.steps, each)):
        flushed = rows[first : first + each]
        writer.add_steps(flushed.tolist())
        writer.add_samples(first, stacks)
        writer.add_vitals(int(flushed[-1, 0]), first + len(flushed), readings)
        if number % COMMIT_EVERY == 0:
            writer.commit()
    writer.close()


def copy(folder: Path, rank: int) -> None:
    """Makes one more rank of one that is written."""
    path = folder / f"rank{rank}.sqlite"
    shutil.copyfile(folder / f"rank{rank % VARIANTS}.sqlite", path)
    with sqlite3.connect(path) as db:
        values = [(json.dumps(value), key) for key, value in place(rank).items()]
        db.executemany("UPDATE meta SET value = ? WHERE key = ?", values)
    db.close()


def place(rank: int) -> dict[str, int | str]:
    """Where a rank ran."""
    return {"rank": rank, "host": f"node{rank // RANKS_PER_HOST:04}"}


def steps_of(shape: Shape, rank: int) -> npt.NDArray[np.int64]:
    """Steps of one rank: its own work, and then it waits for the straggler's gradients."""
    phases = work(shape, rank)
    own = sum(phases.values())
    pace = sum(work(shape, shape.straggler).values()) if shape.ranks > 1 else own
    phases["backward"] += np.maximum(0, pace - own)
    rows = np.zeros((shape.steps, len(COLUMNS)), dtype=np.int64)
    for name, times_ms in phases.items():
        rows[:, len(COUNTS) + SLOT_OF[name]] = times_ms * 1e6
    rows[:, COLUMNS.index("samples")] = 32
    rows[:, COLUMNS.index("tokens")] = 32 * np.random.default_rng(rank).integers(400, 600, shape.steps)
    rows[:, COLUMNS.index("backward_passes")] = 1
    rows[:, COLUMNS.index("spans")] = 5
    rows[:, 0] = rows[:, len(COUNTS) :].sum(axis=1).cumsum()
    return rows


def work(shape: Shape, rank: int) -> dict[str, npt.NDArray[np.float64]]:
    """Milliseconds of one rank's own work, by slot."""
    draw = np.random.default_rng((rank, 1))
    phases = {
        name: shape.step_ms * share * draw.lognormal(0, SCATTER, shape.steps)
        for name, share in USUAL_SHARES.items()
    }
    phases["gap_after_optimizer"] = np.full(shape.steps, shape.step_ms * (1 - sum(USUAL_SHARES.values())))
    if rank == shape.straggler and shape.ranks > 1:
        phases["data_wait"] += shape.step_ms * LATE_SHARE
    return phases


def spoil(folder: Path, shape: Shape, torn: int, missing: int) -> None:
    """Tears the files of some ranks and takes away those of others, from the last one down."""
    for rank in range(shape.ranks - torn - missing, shape.ranks):
        path = folder / f"rank{rank}.sqlite"
        if rank < shape.ranks - missing:
            os.truncate(path, path.stat().st_size // 2)
        else:
            path.unlink()


def row(folder: Path, shape: Shape) -> str:
    """Has the run reported; returns the table's row."""
    report, cost = reported(folder)
    found = [finding for finding in report["findings"] if finding["ranks"]]
    named = [f"{finding['rule']} on rank {finding['ranks'][0]}" for finding in found]
    if shape.ranks > 1 and f"input-straggler on rank {shape.straggler}" not in named:
        raise SystemExit(f"{folder.name}: rank {shape.straggler} is late, and the report names: {named}")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return (
        f"| {shape.ranks:,} | {shape.steps:,} | {size / 1e6:,.0f} | {cost.wall_s:.1f} | {cost.cpu_s:.1f} |"
        f" {cost.peak_bytes / 1e6:,.0f} | {', '.join(named)} |"
    )


def reported(folder: Path) -> tuple[dict[str, Any], Cost]:
    """Asks for a run's report; returns it, and what it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        command = [sys.executable, "-m", "diagnose", "report", str(folder), "--json", "-"]
        process = subprocess.Popen(command, stdout=output)
        peak_bytes = 0
        while process.poll() is None:
            peak_bytes = max(peak_bytes, resident_bytes(process.pid))
            time.sleep(0.02)
        wall_s = time.perf_counter() - begun
        if process.returncode:
            raise SystemExit(f"the report of {folder.name} ended with {process.returncode}")
        output.seek(0)
        report = json.load(output)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return report, Cost(wall_s=wall_s, cpu_s=cpu_s, peak_bytes=peak_bytes)


def resident_bytes(pid: int) -> int:
    """Returns the resident memory of a process and of all that descend from it."""
    try:
        own = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if thread.name != str(pid):
                children += (thread / "children").read_text().split()
    except OSError:
        return 0
    return own + sum(resident_bytes(int(child)) for child in children)


if __name__ == "__main__":
    main()
