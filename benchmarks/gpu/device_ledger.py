"""The device's ledger against a trace of the same steps, and what it costs: examples, and `end_to_end.py`.

    python benchmarks/gpu/device_ledger.py --out out [--rounds 3] [--jobs text ...] [--dry-run]

Per job: one run in which some steps are traced, and in each round one with the device's clock and one
without, one after the other. A job passes if no slot of the ledger is further from the trace than 2 % of
the steps, if the clock adds no more than 50 us to the median step, and if it adds no call that waits for
the device.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

MAX_OFF = 0.02
MAX_COST_US = 50.0
ENOUGH = 3
"""Rounds that tell so little a cost from what two processes differ by."""

REHEARSED_OFF = 0.2
"""In a rehearsal other work may take the CPU between the trace's look at the clock and the ledger's. What
the clock costs is not asked there."""

WARM = 64
"""Steps left out of the times: in the first the hooks look around, and some are traced."""

LONGEST_S = 120.0
"""A run that takes longer is taken for hung: the other jobs are worth having."""

JOBS: dict[str, list[str]] = {
    "text": ["examples/gpt_text.py", "--steps", "400"],
    "images": ["examples/image_classifier.py", "--epochs", "8"],
    "table": ["examples/tabular_mlp.py"],
    "GPT": ["benchmarks/gpu/end_to_end.py", "--jobs", "GPT", "--steps", "100"],
    "ResNet": ["benchmarks/gpu/end_to_end.py", "--jobs", "ResNet", "--steps", "100"],
}
QUICK: dict[str, list[str]] = {"table": ["examples/tabular_mlp.py", "--rows", "8000", "--epochs", "1"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="+", choices=JOBS)
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, with a device that is never behind"
    )
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = QUICK if args.dry_run else {name: JOBS[name] for name in args.jobs or JOBS}  # in this order
    found: dict[str, Any] = {"dry_run": args.dry_run, "jobs": {}}
    for name, command in jobs.items():
        try:
            found["jobs"][name] = measured(name, command, args.rounds, args.dry_run)
        except (subprocess.SubprocessError, ValueError, LookupError, OSError) as error:
            found["jobs"][name] = {"failed": f"{type(error).__name__}: {error}"}
        (args.out / "device_ledger.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print("\n".join(lines(found["jobs"])))
    if args.dry_run:
        print("A rehearsal on a CPU: the times say nothing of a device.")
    bad = [name for name, job in found["jobs"].items() if not all(job.get("passed", {"": False}).values())]
    print(f"{len(jobs) - len(bad)} of {len(jobs)} jobs pass" + (f"; not {', '.join(bad)}" if bad else ""))
    return int(bool(bad))


def measured(name: str, command: list[str], rounds: int, rehearse: bool) -> dict[str, Any]:
    """All runs of one job."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        traced = run(folder / "traced", command, "on", trace=True, rehearse=rehearse)
        without = run(folder / "untraced", command, "off", trace=True, rehearse=rehearse)
        pairs = [
            (
                run(folder / f"on{number}", command, "on", rehearse=rehearse),
                run(folder / f"off{number}", command, "off", rehearse=rehearse),
            )
            for number in range(rounds)
        ]
    costs = [on["median_us"] - off["median_us"] for on, off in pairs]
    job = {
        "command": command,
        "off_share": traced["off_share"],
        "worst_slot": traced["worst_slot"],
        "coverage": traced["coverage"],
        "cost_us": costs,
        "step_us": [on["median_us"] for on, _ in pairs],
        "event_us": [on["event_us"] for on, _ in pairs],
        "syncs": {"with": traced["syncs"], "without": without["syncs"]},
    }
    job["passed"] = {
        "agrees": traced["off_share"] is not None
        and traced["off_share"] <= (REHEARSED_OFF if rehearse else MAX_OFF),
        "cheap": rehearse or len(costs) < ENOUGH or statistics.median(costs) <= MAX_COST_US,
        "waits for nothing": traced["syncs"] == without["syncs"],
    }
    return job


def run(
    folder: Path, command: list[str], clock: str, *, trace: bool = False, rehearse: bool = False
) -> dict[str, Any]:
    """One run of a job's script, and what it left."""
    from diagnose.core.ledger import COUNTS
    from diagnose.store.reader import read_rank

    script, *arguments = command
    words = [sys.executable, str(HERE / "device_ledger_job.py"), "--out", str(folder), "--clock", clock]
    words += ["--trace"] * trace + ["--rehearse"] * rehearse
    words += [str(ROOT / script), *arguments]
    ended = subprocess.run(words, stdout=subprocess.DEVNULL, cwd=folder.parent, timeout=LONGEST_S)
    if ended.returncode and not (folder / "job.json").exists():  # else it is the job's own verdict
        ended.check_returncode()
    log = read_rank(folder / "run" / "rank0.sqlite")
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    times = log.steps[WARM if len(log.steps) > 2 * WARM else 0 :, len(COUNTS) :].sum(axis=1)
    found = {
        "median_us": statistics.median(times.tolist()) / 1000,
        "event_us": (job["clock"] or {}).get("event_ns", 0) / 1000,
        "off_share": None,
        "worst_slot": None,
        "coverage": None,
        "syncs": {},
    }
    if trace:
        found |= against_trace(folder, job, log)
    return found


def against_trace(folder: Path, job: dict[str, Any], log: Any) -> dict[str, Any]:
    """How far the ledger of the traced steps is from the trace: the worst slot, as a part of the steps."""
    from device_ledger_truth import Truth

    from diagnose.core.ledger import SLOTS

    truth = Truth(folder / "trace.json")
    found: dict[str, Any] = {"syncs": dict(truth.syncs)}
    ends = [(mark, step) for mark, step in job["ends"][1:]]  # the first is where the profiler began
    if job["clock"] is None or len(ends) < 2:
        return found
    by_trace = dict.fromkeys(range(len(SLOTS)), 0)
    by_ledger = dict.fromkeys(range(len(SLOTS)), 0)
    covered = 0
    for (begin, _), (end, step) in pairwise(ends):
        row = log.device_steps[step]
        if row[0]:
            continue
        covered += 1
        for slot, spent_ns in truth.between(begin, end).items():
            by_trace[slot] += spent_ns
        for slot in by_ledger:
            by_ledger[slot] += int(row[1 + slot])
    total_ns = sum(by_trace.values())
    worst = max(by_trace, key=lambda slot: abs(by_trace[slot] - by_ledger[slot]))
    return found | {
        "off_share": abs(by_trace[worst] - by_ledger[worst]) / total_ns if total_ns else None,
        "worst_slot": SLOTS[worst],
        "coverage": covered / (len(ends) - 1),
    }


def lines(jobs: dict[str, Any]) -> list[str]:
    """The table."""
    head = (
        "| job | furthest from the trace | coverage | step, us | clock adds, us | event, us | waits added |"
    )
    found = [head, "|---|---|--:|--:|--:|--:|--:|"]
    for name, job in jobs.items():
        if "failed" in job:
            found.append(f"| {name} | {job['failed']} | | | | | |")
            continue
        off = "-" if job["off_share"] is None else f"{job['off_share']:.2%} ({job['worst_slot']})"
        costs = sorted(job["cost_us"])
        cost = f"{statistics.median(costs):.0f} ({costs[0]:.0f} to {costs[-1]:.0f})"
        added = sum(job["syncs"]["with"].values()) - sum(job["syncs"]["without"].values())
        covered = "-" if job["coverage"] is None else f"{job['coverage']:.0%}"
        step_us, event_us = statistics.median(job["step_us"]), statistics.median(job["event_us"])
        found.append(f"| {name} | {off} | {covered} | {step_us:.0f} | {cost} | {event_us:.1f} | {added} |")
    return [*found, ""]


if __name__ == "__main__":
    sys.exit(main())
