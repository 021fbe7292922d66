"""Is the time that `diagnose run` reports the time that was spent, and the line the one that spent it?

Wastes a known time at known lines of `attribution_job.py`, singly and in pairs, in loops of several shapes,
and compares the report with what the script measured itself. Prints a markdown table on stdout and exits 1
if a row failed:

    python benchmarks/attribution.py > docs/attribution.md
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from attribution_cases import CASES, QUICK, STAGES, Case, Fault
from attribution_run import JOB, MAX_SHARE_ERROR, WARMUP, Measured, measure

STEPS = 220
QUICK_STEPS = 120

MAX_ERROR_SHARE = 0.03
MAX_ERROR_MS = 0.3
"""A phase may be wrong by this part of the step or by this much, whichever is more."""

BASELINE_EVERY = 8
"""Runs after which a loop is run again without fault."""


def tolerance_ms(step_ms: float) -> float:
    """Returns by how much a phase may be wrong."""
    return max(MAX_ERROR_MS, MAX_ERROR_SHARE * step_ms)


@lru_cache
def lines_of(place: str) -> frozenset[tuple[str, int]]:
    """Returns file and line of every such fault in the job; a loop passes just one of them."""
    return frozenset(
        (str(path), number)
        for path in JOB.parent.glob("attribution_*.py")
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if f'fault("{place}")' in text or text.endswith(f"# fault: {place}")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One fault of one run, judged.

    Attributes:
        fault: The fault, and what shared the run with it.
        phase: The phase that it belongs to, or the stage of loading.
        injected_ms: What truly was spent there, by the script's own clock.
        error_ms: How far the report is from that.
        step_ms: Time of a step.
        others: The phase without fault that is furthest from the script's own clock, and how far.
        two_runs_ms: How far the report is when what a run without fault reported is taken off instead.
        line: The line that was named, right or wrong.
        problems: Why the row failed; empty when it passed.
    """

    case: Case
    fault: str
    phase: str
    injected_ms: float
    error_ms: float
    step_ms: float
    others: str = ""
    two_runs_ms: float | None = None
    line: str = ""
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = (
            self.case.loop,
            self.fault,
            self.phase,
            f"{self.injected_ms:.2f}",
            f"{self.injected_ms + self.error_ms:.2f}",
            f"{self.error_ms:+.2f}",
            f"{100 * self.error_ms / self.step_ms:+.1f} %",
            self.others,
            "" if self.two_runs_ms is None else f"{self.two_runs_ms:+.2f}",
            self.line,
            f"**failed: {'; '.join(self.problems)}**" if self.problems else "pass",
        )
        return f"| {' | '.join(cells)} |"


def judge(case: Case, run: Measured, baseline: Measured) -> Iterator[Row]:
    """Compares a run with what was true."""
    faulty = {fault.phase for fault in case.faults}
    rest = sorted((set(run.own) | set(run.reported)) - faulty, key=lambda phase: -abs(run.error(phase)))
    waits = case.loop == "workers"
    only_own = case.loop in ("workers", "table")
    tolerance = tolerance_ms(run.step_ms)
    for fault in case.faults:
        same_phase = [other for other in case.faults if other.phase == fault.phase]
        error = run.error(fault.phase)
        # How long a loop waits for workers that load ahead, or what an operator takes, no fault knows.
        injected = (
            run.own["data_wait"] if only_own else sum(run.injected[other.place] for other in same_phase)
        )
        added = run.reported[fault.phase] - baseline.reported.get(fault.phase, 0.0)
        line, problem = named_line(fault, run, rank=len(same_phase), in_worker=waits)
        off = [phase for phase in (fault.phase, *rest) if abs(run.error(phase)) > tolerance]
        title = " with ".join(map(str, (fault, *(other for other in case.faults if other is not fault))))
        yield Row(
            case=case,
            fault=title,
            phase=fault.phase,
            injected_ms=injected,
            error_ms=error,
            step_ms=run.step_ms,
            others=f"{rest[0]} {run.error(rest[0]):+.2f}",
            two_runs_ms=None if only_own else added - injected,
            line=line,
            problems=(
                *run.problems,
                *problem,
                *(f"{phase} off by {run.error(phase):+.2f} ms" for phase in off),
            ),
        )
        if fault.place in STAGES:
            stage = STAGES[fault.place]
            error = run.stage_errors[stage]
            yield Row(
                case=case,
                fault=title,
                phase=f"{stage} {'in workers' if waits else 'in the loop'}",
                injected_ms=run.injected[fault.place],
                error_ms=error,
                step_ms=run.step_ms,
                problems=(f"off by {error:+.2f} ms",) if abs(error) > tolerance else (),
            )


def named_line(fault: Fault, run: Measured, *, rank: int, in_worker: bool) -> tuple[str, tuple[str, ...]]:
    """Returns the line that the report names for a fault, and what is wrong with it.

    Args:
        rank: How many faults the phase has: the line must be among as many of its most expensive ones.
        in_worker: Whether it is a worker that spends the time.
    """
    lines = [line for line in run.where if line["phase"] == fault.phase and line["in_worker"] == in_worker]
    named = [(line["file"], line["line"]) for line in lines[:rank]]
    texts = [f"{Path(file).name}:{number}" for file, number in named] or ["none"]
    for place, text in zip(named, texts, strict=False):
        if place in lines_of(fault.place):
            return text, ()
    right = " or ".join(f"{Path(file).name}:{number}" for file, number in sorted(lines_of(fault.place)))
    return ", ".join(texts), (f"the line is {right}",)


INTRODUCTION = """\
# Attribution

Time was wasted on purpose at known lines of `benchmarks/attribution_job.py`, and the report of
`diagnose run` compared with what the script measured itself. Printed by `benchmarks/attribution.py`.
{heading}

Milliseconds per step, mean of {steps} measured steps of about 10 to 20 ms.

- *Injected* is what the faults of the phase truly took, by the script's own clock around them. With
  *workers*, which load ahead, and *table*, where an operator is the fault, it is all of `data_wait`.
- *Found* is the phase in the report, less what the script's own clock gave to the rest of that phase in the
  same run. *Error* is the difference between the two, in milliseconds and in parts of the step.
- *Worst other* is the phase without fault that is furthest from the script's own clock.
- *Two runs* is the error when what a run without fault reported for the phase is taken off instead. It
  holds the noise between two runs as well, and no verdict rests on it.
- *Fetch* and *collate* are the stages of loading a batch, which the report has besides the phases: per
  batch, and in a worker's own time where workers load.
- A row passes when no phase, with or without a fault, is off by more than {share:.0%} of the step or
  {ms} ms, whichever is more; the shares sum to 1 within {sum:g}; every step was found; and the most
  expensive source line of the phase is the line of the fault. Two faults in one phase must be its two most
  expensive lines.

| loop | fault | phase | injected | found | error | of step | worst other | two runs | line | verdict |
|---|---|---|--:|--:|--:|--:|---|--:|---|---|"""


def heading() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    return f"{datetime.date.today().isoformat()}; {cores} cores, {platform.system()}, {versions}."


def summary(rows: list[Row], num_runs: int) -> str:
    passed = sum(not row.problems for row in rows)
    worst = max(rows, key=lambda row: abs(row.error_ms))
    paired = [row for row in rows if row.two_runs_ms is not None]
    near = sum(abs(row.two_runs_ms or 0.0) <= tolerance_ms(row.step_ms) for row in paired)
    text = (
        f"{passed} of {len(rows)} rows pass, from {num_runs} runs with faults. The largest error is "
        f"{worst.error_ms:+.2f} ms, {100 * worst.error_ms / worst.step_ms:+.1f} % of the step."
    )
    if paired:
        text += f" Against a run without fault, {near} of {len(paired)} are within the same bounds."
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few shorter runs that pass every phase")
    parser.add_argument("--only", metavar="TEXT", help="run the cases whose name contains this")
    args = parser.parse_args()
    cases = [case for case in (QUICK if args.quick else CASES) if not args.only or args.only in str(case)]
    if not cases:
        names = "\n  ".join(map(str, CASES))
        parser.error(f"no case is called {args.only!r}; there are:\n  {names}")

    steps = QUICK_STEPS if args.quick else STEPS
    limits = {"share": MAX_ERROR_SHARE, "ms": MAX_ERROR_MS, "sum": MAX_SHARE_ERROR}
    print(INTRODUCTION.format(heading=heading(), steps=steps - WARMUP, **limits), flush=True)
    rows: list[Row] = []
    for loop, of_loop in groupby(cases, key=lambda case: case.loop):
        for index, case in enumerate(of_loop):
            if index % BASELINE_EVERY == 0:
                baseline = measure(Case(loop), steps=steps)
            for row in judge(case, measure(case, steps=steps), baseline):
                rows.append(row)
                print(row, flush=True)
    print(f"\n{summary(rows, len(cases))}")
    sys.exit(any(row.problems for row in rows))


if __name__ == "__main__":
    main()
