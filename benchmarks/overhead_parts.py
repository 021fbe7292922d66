"""What measuring adds to a step, to the start and to the end, each by itself.

    python benchmarks/overhead_parts.py [--seconds 60] [--starts 12] [--device cuda]
        [--step-ms 1 10 100] [--markdown docs/overhead-parts.md]

`overhead.py` compares whole runs, as a user would, and beside other tools; but on a shared machine two runs
of the same job differ by more than what is to be found. So here:

- *Step*: one process trains and is measured. Every few steps the measuring is switched off or on again: all
  wrappers and hooks of torch's are taken out or put back, and the sampler's timer is stopped or started. A
  block of steps with it is compared with the blocks without before and after, milliseconds away; the first
  half of a block, in which caches fill, does not count. What is left out: what the flusher's thread, on
  another core, does to the shared caches. On a GPU, also without the events by which the device's clock is
  read; there the thread waits, and the wall's time is the one that counts.
- *Start and end*: a job of a few steps notes when its first line ran, when torch was imported and when its
  last line ran. With and without `diagnose` alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

JOB = Path(__file__).with_name("overhead_parts_job.py")
ROOT = Path(__file__).parents[1]
STEP_MS = (1, 10, 100)
TRIM = 0.1
"""Part of the pairs left out at either end: another machine's work falls into some blocks."""

PARTS = ("until the script's first line", "importing torch", "after its last line")
START, ALL = "start-up: the first two", "all three"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=60, help="of each step length")
    parser.add_argument("--starts", type=int, default=12, help="pairs of short jobs")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--step-ms", type=int, nargs="+", default=list(STEP_MS), choices=STEP_MS)
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    machine = f"{os.cpu_count()} cores, {platform.machine()}, {gpu(args.device)}, "
    machine += f"Python {platform.python_version()}"
    told: list[str] = []

    def tell(*lines: str) -> None:
        told.extend(lines)
        print("\n".join(lines), flush=True)
        if args.markdown:  # as far as it has come: whoever has little time may end it
            args.markdown.write_text("\n".join([*told, ""]), encoding="utf-8")

    tell(
        "# What measuring adds, part by part",
        "",
        f"`python benchmarks/overhead_parts.py --seconds {args.seconds} --starts {args.starts}`, "
        f"{date.today()}, {machine}, torch {version()}. Steps: trimmed mean over pairs of blocks with "
        "and without, standard error. Start and end: median and range.",
        "",
        "| step | bare, us of CPU time | diagnose adds | part of the step | to the wall | pairs |",
        "|---|---|---|---|---|---|",
    )
    failed = []
    for step_ms in args.step_ms:
        try:
            tell(*steps(step_ms, args.seconds, args.device))
        except subprocess.CalledProcessError as error:
            failed.append(f"{step_ms} ms: {error.stderr}")
    tell("", "| start and end, seconds | bare | diagnose adds |", "|---|---|---|", *starts(args.starts))
    if failed:
        raise SystemExit("\n".join(failed))


def version() -> str:
    import torch

    return str(torch.__version__)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def gpu(device: str) -> str:
    """Names the GPU that is used."""
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else "no GPU"


def steps(step_ms: int, seconds: int, device: str) -> list[str]:
    """Returns the rows of one step length, and what the recorder says of itself."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(JOB), "steps", folder, str(step_ms), str(seconds), device]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        account = found["own account"] | by_the_store(Path(folder))
    blocks = found["blocks"]  # without and with in turn, without at both ends
    bare, bare_wall = (statistics.median(block[place] for block in blocks[::2]) for place in (1, 2))
    rows = []
    for state in dict.fromkeys(block[0] for block in blocks[1::2]):
        triples = [
            t for t in zip(blocks[:-2:2], blocks[1:-1:2], blocks[2::2], strict=True) if t[1][0] == state
        ]
        (mean, error), (wall, wall_error) = (
            trimmed_mean(sorted(b[place] - (a[place] + c[place]) / 2 for a, b, c in triples))
            for place in (1, 2)
        )
        rows.append(
            f"| {step_ms} ms{state.removeprefix('on')} | {bare:,.0f} | {mean:+,.0f} ± {error:,.0f} "
            f"| {mean / bare:+.1%} ± {error / bare:.1%} "
            f"| {wall:+,.0f} ± {wall_error:,.0f} of {bare_wall:,.0f} | {len(triples)} |"
        )
    told = ", ".join(f"{name} {value:,.4g}" for name, value in account.items())
    print(f"{step_ms} ms: {told}", file=sys.stderr)
    return rows


def by_the_store(folder: Path) -> dict[str, float]:
    """What the run's own record says that measuring took: microseconds of a recorded step."""
    sys.path.insert(0, str(ROOT))
    from diagnose.store.reader import read_rank

    log = read_rank(next(folder.rglob("rank0.sqlite")))
    parts = {name: float(log.meta.get(f"{name}_ns") or 0) / 1000 for name in ("span", "sampler", "flusher")}
    return {"a span, us": parts.pop("span")} | {
        f"{name}, us/step": us / max(1, len(log.steps)) for name, us in parts.items()
    }


def trimmed_mean(values: list[float]) -> tuple[float, float]:
    """Returns the mean of sorted values without `TRIM` of them at either end, and its standard error, which
    comes from the winsorized deviation (Tukey and McLaughlin 1963)."""
    cut = int(len(values) * TRIM)
    kept = values[cut : len(values) - cut]
    drawn_in = [kept[0]] * cut + kept + [kept[-1]] * cut
    return statistics.mean(kept), statistics.stdev(drawn_in) / ((1 - 2 * TRIM) * len(values) ** 0.5)


def starts(pairs: int) -> list[str]:
    """Returns the rows of the parts of start and end."""
    took: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    for number in range(pairs):
        for measured in (True, False) if number % 2 else (False, True):
            took[measured].append(short(measured))
    rows = []
    sums = {**{part: slice(i, i + 1) for i, part in enumerate(PARTS)}, START: slice(2), ALL: slice(3)}
    for part, of in sums.items():
        bare, with_ = ([sum(run[of]) for run in took[measured]] for measured in took)
        more = [b - a for a, b in zip(bare, with_, strict=True)]
        rows.append(f"| {part} | {spread(bare)} | {spread(more, '+')} |")
    return rows


def short(measured: bool) -> tuple[float, ...]:
    """Runs a job of a few steps; returns the seconds of each of `PARTS`."""
    with tempfile.TemporaryDirectory() as folder:
        tool = ["-m", "diagnose", "run", "--run-dir", folder] if measured else []
        out = Path(folder, "times.json")
        begun = time.time()
        command = [sys.executable, *tool, str(JOB), "start", str(out)]
        subprocess.run(command, env=environment(), capture_output=True, check=True)
        ended = time.time()
        first, imported, last = json.loads(out.read_text(encoding="utf-8"))
    return first - begun, imported - first, ended - last


def spread(values: list[float], sign: str = "") -> str:
    return f"{statistics.median(values):{sign}.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
