"""What one recording rank asks of its file system, and so what ten thousand do.

    python benchmarks/scale_files.py [--minutes 10] [--step-ms 250] [--markdown PATH]

A process writes as many flushes as a rank makes in so many minutes, through the store's own writer and with
the records of a real run, as fast as it can, under `strace`. Calls are counted, bytes added up; what is per
second is per second of the job, which flushes twice in each.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from scale import FLUSH_EVERY_MS, RANKS_PER_HOST, Shape, recorded, steps_of

from diagnose.launch.rank_choice import in_sample
from diagnose.store.reader import read_rank
from diagnose.store.writer import Writer

RANKS = 10_000
CALLS = ("pwrite64", "write", "fsync", "fdatasync", "ftruncate", "openat", "unlink")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--step-ms", type=float, default=250.0)
    parser.add_argument("--markdown", type=Path, help="also write the table to this file")
    parser.add_argument("--write", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    steps = round(args.minutes * 60_000 / args.step_ms)
    shape = Shape(ranks=2, steps=steps, step_ms=args.step_ms)
    if args.write:
        write(args.write[0], args.write[1], shape)
        return
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        recorded(root)
        trace = root / "trace"
        folder = root / "run"
        folder.mkdir()
        child = [sys.executable, __file__, "--minutes", str(args.minutes), "--step-ms", str(args.step_ms)]
        child += ["--write", str(folder), str(root / "real" / "rank0.sqlite")]
        strace = ["strace", "-f", "-y", "-s", "0", "-o", str(trace), "-e", f"trace={','.join(CALLS)}"]
        during = subprocess.run([*strace, *child], check=True, capture_output=True, text=True).stdout
        lines = [line for line in trace.read_text().splitlines() if str(folder) in line]
        size = sum(path.stat().st_size for path in folder.iterdir())
        after = len(list(folder.iterdir()))
    text = table(lines, int(during), after, size, args.minutes, args.step_ms)
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


def write(folder: Path, real: Path, shape: Shape) -> None:
    """Writes as the flusher does; prints how many files there are while it does."""
    template = read_rank(real)
    writer = Writer(folder, 0)
    stacks = [(slot, frames, weight) for _, slot, frames, weight in template.samples[-8:]]
    state = {key: template.meta[key] for key in ("facts", "counters", "notes") if key in template.meta}
    _, _, readings = template.vitals[-1]
    rows = steps_of(shape, 0)
    for first in range(0, shape.steps, shape.steps_per_flush):
        flushed = rows[first : first + shape.steps_per_flush]
        writer.add_steps(flushed.tolist())
        writer.add_samples(first, stacks)
        writer.add_vitals(int(flushed[-1, 0]), first + len(flushed), readings)
        writer.set_meta({"state": {**state, "steps": first}})
        writer.commit()
    print(len(list(folder.iterdir())))
    writer.close()


def table(lines: list[str], during: int, after: int, size: int, minutes: float, step_ms: float) -> str:
    """Returns what was counted, for one rank, for all and for a sample."""
    seconds = minutes * 60
    written = [line for line in lines if re.search(r"\bp?write(64)?\(", line)]
    num_bytes = sum(int(line.rpartition("= ")[2].split()[0]) for line in written)
    syncs = sum("sync(" in line for line in lines)
    opened = sum("openat(" in line for line in lines)
    sample = sum(in_sample(rank, RANKS, rank % RANKS_PER_HOST, RANKS_PER_HOST) for rank in range(RANKS))
    rows = [
        ("files in the folder, while it trains", during),
        ("files in the folder, when it has ended", after),
        ("opens, in all", opened),
        ("writes per second", len(written) / seconds),
        ("KB written per second", num_bytes / 1000 / seconds),
        ("syncs per minute", syncs / minutes),
        ("MB kept, per hour", size / 1e6 * 60 / minutes),
    ]
    head = [
        f"Measured on {date.today()}: {minutes:g} minutes of one rank's flushes, steps of {step_ms:g} ms,"
        f" one flush each {FLUSH_EVERY_MS} ms; the other columns are multiples of it, with hosts of"
        f" {RANKS_PER_HOST} ranks. Printed by `benchmarks/scale_files.py`.",
        "",
        f"| | one rank | {RANKS:,} ranks | `--ranks sample`: {sample:,} of them |",
        "|---|---:|---:|---:|",
    ]
    body = [
        f"| {name} | {rounded(value)} | {rounded(value * RANKS)} | {rounded(value * sample)} |"
        for name, value in rows
    ]
    return "\n".join([*head, *body]) + "\n"


def rounded(value: float) -> str:
    """Returns a number as it can be read."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
