"""How much do pairs of runs of one version differ: one run after the other, and both at once, in turns?

    python benchmarks/gate_turns.py [--pairs 8] [SCRIPT [ARGS]]

The gate estimates a change from the logarithms of such ratios. Their standard deviation says how many
pairs it needs. Prints a table; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path

from diagnose.gate.in_turns import KEEPS_FREED
from diagnose.gate.measure import RunPlan, measured_in_turns, measured_run
from diagnose.gate.result import MeasuredRun, Metric, Side

JOB = Path(__file__).with_name("gate_job.py")
NAMES = ("base-01", "head-01")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("command", nargs="*", default=[str(JOB)])
    args = parser.parse_args()
    print("| runs of a pair | freed memory | pairs | standard deviation | least to most | seconds a pair |")
    print("|---|---|--:|--:|--:|--:|")
    for at_once in (False, True):
        for keeps in (False, True):
            logs, begun = [], time.monotonic()
            for _ in range(args.pairs):
                logs.append(log_ratio(tuple(args.command), args.steps, at_once=at_once, keeps=keeps))
                print(f"{at_once=} {keeps=} {logs[-1]:+.3f}", file=sys.stderr)
            took_s = (time.monotonic() - begun) / args.pairs
            how = "at once, in turns" if at_once else "one after the other"
            memory = "kept" if keeps else "as it comes"
            spread = f"{min(logs):+.3f} to {max(logs):+.3f}"
            sd = statistics.stdev(logs)
            print(f"| {how} | {memory} | {args.pairs} | {sd:.3f} | {spread} | {took_s:.1f} |")


def log_ratio(command: tuple[str, ...], steps: int, *, at_once: bool, keeps: bool) -> float:
    """Returns by how much the second of two equal runs was slower."""
    side = Side(
        label="base", name="", root=Path.cwd(), command=command, environment=KEEPS_FREED if keeps else {}
    )
    plan = RunPlan(steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        runs: list[MeasuredRun]
        if at_once:
            runs = measured_in_turns([side, side], NAMES, Path(folder), plan)
        else:
            runs = [measured_run(side, name, Path(folder), plan) for name in NAMES]
    first, second = (run.figures[Metric.STEP_MS] for run in runs)
    return math.log(second / first)


if __name__ == "__main__":
    main()
