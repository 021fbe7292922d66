"""The device's ledger against a trace of the same steps, and what it costs: examples, and `end_to_end.py`.

    python benchmarks/gpu/device_ledger.py --out out [--rounds 3] [--seconds 75] [--jobs text ...]

Per job: two runs in which some steps are traced, with the device's clock and without, and in each round two
more that are timed. A job passes if no slot of the ledger is further from the trace than 2 % of the steps,
if the clock adds no more than 50 us to the median step, and if it adds no call that waits for the device.
Jobs are traced before the first round. What the clock costs is judged where there were three; with
`--seconds`, nothing is begun that may not end by then, no third job is traced in the time that the quickest
job's rounds need, and what was not reached is no failure.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

MAX_OFF = 0.02
MAX_COST_US = 50.0
ENOUGH = 3
"""Rounds that tell so little a cost from what two processes differ by."""

FAILURES = (subprocess.SubprocessError, ValueError, LookupError, OSError)

REHEARSED_OFF = 0.2
"""In a rehearsal other work may take the CPU between the trace's look at the clock and the ledger's. What
the clock costs is not asked there."""

WARM = 64
"""Steps left out of the times: in the first the hooks look around, and some are traced."""

LONGEST_S = 120.0
"""A run that takes longer is taken for hung: the other jobs are worth having."""

ONE_ARM = ["benchmarks/gpu/end_to_end.py", "--steps", "100", "--arms", "torch default", "--jobs"]
JOBS: dict[str, list[str]] = {
    "table": ["examples/tabular_mlp.py"],
    "text": ["examples/gpt_text.py", "--steps", "400"],
    "ResNet": [*ONE_ARM, "ResNet"],
    "GPT": [*ONE_ARM, "GPT"],
    "images": ["examples/image_classifier.py", "--epochs", "3"],
}
"""The quickest first: what is found is printed as it is, and there may be no time for the others."""

QUICK: dict[str, list[str]] = {"table": ["examples/tabular_mlp.py", "--rows", "8000", "--epochs", "1"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--rounds", type=int, default=ENOUGH, help="at most so many, of each job")
    parser.add_argument("--seconds", type=int, help="of all the time (default: what it takes)")
    parser.add_argument("--jobs", nargs="+", choices=JOBS)
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, with a device that is never behind"
    )
    args = parser.parse_args()
    sys.path[:0] = [str(ROOT)]
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = QUICK if args.dry_run else {name: JOBS[name] for name in args.jobs or JOBS}  # in this order
    found: dict[str, Any] = {"dry_run": args.dry_run, "jobs": {}}
    until = math.inf if args.seconds is None else time.monotonic() + args.seconds
    longest_s = 0.0
    rounds = 1 if args.dry_run else args.rounds
    print("\n".join(HEAD))

    def tell(name: str) -> None:
        (args.out / "device_ledger.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(line(name, found["jobs"][name]), flush=True)

    for name, command in jobs.items():
        begun = time.monotonic()
        if begun + longest_s + rounds_s(found["jobs"], rounds) > until:
            break
        try:
            found["jobs"][name] = traced(command, args.dry_run)
        except FAILURES as error:
            found["jobs"][name] = {"failed": f"{type(error).__name__}: {error}"}
        longest_s = max(longest_s, time.monotonic() - begun)
        tell(name)
    for name in judged(found["jobs"], rounds, until, args.dry_run):
        tell(name)
    if args.dry_run:
        print("A rehearsal on a CPU: the times say nothing of a device.")
    found_jobs = found["jobs"].items()
    bad = [name for name, job in found_jobs if "failed" in job or False in job["passed"].values()]
    missed = [name for name in jobs if name not in found["jobs"]]
    unjudged = [name for name, job in found_jobs if name not in bad and job["passed"]["cheap"] is None]
    print(
        f"{len(found_jobs) - len(bad)} of {len(jobs)} jobs pass"
        + (f"; not {', '.join(bad)}" if bad else "")
        + (f"; no time for {', '.join(missed)}" if missed else "")
        + (f"; what the clock costs is not judged in {', '.join(unjudged)}" if unjudged else "")
    )
    return int(bool(bad))


def rounds_s(jobs: dict[str, Any], rounds: int) -> float:
    """The time to leave for the rounds of the quickest job, which tell more than a third job's trace."""
    sound = [job["round_s"] for job in jobs.values() if "failed" not in job]
    return rounds * min(sound) if len(sound) > 1 else 0.0


def judged(jobs: dict[str, Any], rounds: int, until: float, rehearse: bool) -> Iterator[str]:
    """Goes through the rounds of the jobs, the quickest job first, while there is time; yields the names of
    those that have had any."""
    sound = [name for name, job in jobs.items() if "failed" not in job]
    for name in sorted(sound, key=lambda name: jobs[name]["round_s"]):
        job = jobs[name]
        try:
            while len(job["cost_us"]) < rounds and time.monotonic() + job["round_s"] < until:
                another_round(job, rehearse)
        except FAILURES as error:
            job["failed"] = f"{type(error).__name__}: {error}"
        if "failed" in job or job["cost_us"]:
            yield name


def traced(command: list[str], rehearse: bool) -> dict[str, Any]:
    """One job, as far as traces tell of it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = run(Path(scratch) / "traced", command, "on", trace=True, rehearse=rehearse)
        without = run(Path(scratch) / "untraced", command, "off", trace=True, rehearse=rehearse)
    job: dict[str, Any] = {
        "command": command,
        "off_share": found["off_share"],
        "worst_slot": found["worst_slot"],
        "coverage": found["coverage"],
        "slots_ms": found["slots_ms"],
        "round_s": time.monotonic() - begun,  # a round's runs are as many, and no longer
        "cost_us": [],
        "step_us": [],
        "event_us": [],
        "syncs": {"with": found["syncs"], "without": without["syncs"]},
    }
    job["passed"] = {
        "agrees": found["off_share"] is not None
        and found["off_share"] <= (REHEARSED_OFF if rehearse else MAX_OFF),
        "waits for nothing": found["syncs"] == without["syncs"],
        "cheap": None,
    }
    return job


def another_round(job: dict[str, Any], rehearse: bool) -> None:
    """One more run of a job with the device's clock and one without."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        on = run(Path(scratch) / "on", job["command"], "on", rehearse=rehearse)
        off = run(Path(scratch) / "off", job["command"], "off", rehearse=rehearse)
    job["round_s"] = time.monotonic() - begun
    job["cost_us"].append(on["median_us"] - off["median_us"])
    job["step_us"].append(on["median_us"])
    job["event_us"].append(on["event_us"])
    judged = not rehearse and len(job["cost_us"]) >= ENOUGH
    job["passed"]["cheap"] = statistics.median(job["cost_us"]) <= MAX_COST_US if judged else None


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
        "slots_ms": {},
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
        "slots_ms": {  # by the trace, and by the ledger
            SLOTS[slot]: [by_trace[slot] / 1e6, by_ledger[slot] / 1e6]
            for slot in by_trace
            if by_trace[slot] or by_ledger[slot]
        },
    }


HEAD = (
    "| job | furthest from the trace | coverage | step, us | clock adds, us | event, us | waits added |",
    "|---|---|--:|--:|--:|--:|--:|",
)


def line(name: str, job: dict[str, Any]) -> str:
    """A job's line of the table."""
    if "failed" in job:
        return f"| {name} | {job['failed']} | | | | | |"
    off = "-" if job["off_share"] is None else f"{job['off_share']:.2%} ({job['worst_slot']})"
    step = cost = event = "-"
    if costs := sorted(job["cost_us"]):
        step = f"{statistics.median(job['step_us']):.0f}"
        event = f"{statistics.median(job['event_us']):.1f}"
        cost = f"{statistics.median(costs):.0f} ({costs[0]:.0f} to {costs[-1]:.0f})"
        if job["passed"]["cheap"] is None:
            cost += ", not judged"
    added = sum(job["syncs"]["with"].values()) - sum(job["syncs"]["without"].values())
    covered = "-" if job["coverage"] is None else f"{job['coverage']:.0%}"
    return f"| {name} | {off} | {covered} | {step} | {cost} | {event} | {added} |"


if __name__ == "__main__":
    sys.exit(main())
