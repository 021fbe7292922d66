"""What does `diagnose run --tune` cost a job that it cannot make faster?

    python benchmarks/tuning_price.py [--pairs 4] [--steps-times 1] [--against watched]

Two runs of one null job of `benchmarks/tuning/` at a time, each held to a CPU of its own: what else happens
on a shared machine happens to both. One is plain (or watched: `diagnose run` without `--tune`), the other
tuned; each pair is run a second time with the CPUs changed, and the logarithms of both ratios are averaged.
The clock is that of the whole script, start-up, diagnoses, trials and report included. Prints a table;
progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tuning import JOBS, machine, named

STEPS = {"null_matrices": 10_000, "null_short_steps": 200_000}
"""About a minute or two on one CPU."""
OPTIONS: dict[str, list[str] | None] = {"plain": None, "watched": [], "tuned": ["--tune"]}


@dataclass(frozen=True)
class Run:
    """One run: wall seconds, the last line it printed, and what was tried and kept in it."""

    seconds: float
    printed: str
    trial_steps: int = 0
    kept: tuple[str, ...] = ()


def run(job: str, steps: int, arm: str, cpu: int) -> Run:
    """Runs a job on one CPU.

    Raises:
        SystemExit: If it fails, with the end of what it said.
    """
    script = [str(JOBS / f"{job}.py"), "--steps", str(steps)]
    options = OPTIONS[arm]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, *script]
        if options is not None:
            ours = ["--json", f"{folder}/report.json", "--run-dir", folder, "--quiet"]
            command = [sys.executable, "-m", "diagnose", "run", *options, *ours, *script]
        begun = time.perf_counter()
        ended = subprocess.run(
            ["taskset", "--cpu-list", str(cpu), *command],
            capture_output=True,
            text=True,
            check=False,
            cwd=folder,
        )
        seconds = time.perf_counter() - begun
        if ended.returncode:
            raise SystemExit(f"{job}, {arm}, failed:\n{ended.stderr[-2000:]}")
        printed = ended.stdout.strip().splitlines()[-1]
        if options is None:
            return Run(seconds, printed)
        trials = json.loads(Path(folder, "report.json").read_text(encoding="utf-8")).get("trials", [])
        return Run(
            seconds=seconds,
            printed=printed,
            trial_steps=sum(trial["steps_spent"] for trial in trials),
            kept=tuple(named(trial) for trial in trials if trial["state"] == "kept"),
        )


def both(job: str, steps: int, arms: tuple[str, str], cpus: tuple[int, int]) -> tuple[Run, Run]:
    """Runs both arms at once, each on its CPU."""
    runs: dict[int, Run] = {}

    def go(index: int) -> None:
        runs[index] = run(job, steps, arms[index], cpus[index])

    threads = [threading.Thread(target=go, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(runs) < 2:
        raise SystemExit(f"{job}: a run failed")
    return runs[0], runs[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps-times", type=float, default=1.0, help="longer or shorter runs")
    parser.add_argument("--against", choices=("plain", "watched"), default="plain")
    parser.add_argument("--arm", choices=tuple(OPTIONS), default="tuned")
    parser.add_argument("--only", choices=tuple(STEPS))
    args = parser.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:2]
    if len(cpus) < 2:
        raise SystemExit("two CPUs are needed: one for each run")
    arms = (args.against, args.arm)
    asked = " ".join(["python", "benchmarks/tuning_price.py", *sys.argv[1:]])
    print(f"`{asked}`, {date.today()}, {machine()}\n")
    print(
        f"| job | steps | {args.against}, s | {args.arm} takes longer by | kept | trial steps | numbers |"
    )
    print("|---|--:|--:|--:|---|--:|---|")
    for job, usual in STEPS.items():
        if args.only in (None, job):
            print(row(job, int(usual * args.steps_times), arms, (cpus[0], cpus[1]), args.pairs))


def row(job: str, steps: int, arms: tuple[str, str], cpus: tuple[int, int], pairs: int) -> str:
    """Measures one job, and returns its line of the table."""
    costs, seen = [], []
    for number in range(pairs):
        changed = (cpus, cpus[::-1]) if number % 2 == 0 else (cpus[::-1], cpus)
        two = [both(job, steps, arms, order) for order in changed]
        seen += two
        costs.append(math.exp(statistics.fmean(math.log(b.seconds / a.seconds) for a, b in two)) - 1)
        told = ", ".join(f"{a.seconds:.1f} {b.seconds:.1f} s" for a, b in two)
        print(f"{job}: {told}: {costs[-1]:+.1%}", file=sys.stderr)
    kept = sorted({" + ".join(b.kept) or "nothing" for _, b in seen})
    cells = [
        job,
        f"{steps:,}",
        f"{statistics.median(a.seconds for a, _ in seen):.0f}",
        f"{statistics.median(costs):+.1%} ({min(costs):+.1%} to {max(costs):+.1%})",
        "; ".join(kept),
        f"{statistics.median(b.trial_steps for _, b in seen):,.0f}",
        "same bits" if all(a.printed == b.printed for a, b in seen) else "DIFFERENT",
    ]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
