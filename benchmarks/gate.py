"""How often does the gate err on real runs, and does it name the phase that was made slower?

    python benchmarks/gate.py --results gates.jsonl > docs/gate.md      hours, on a quiet machine
    python benchmarks/gate.py --quick                                   one gate of each sort, minutes
    python benchmarks/gate.py --report --results gates.jsonl            only the tables

Runs `gate_job.py` against itself (A/A), and against itself with time added to a known phase, through the
whole of `diagnose gate`, on the machine as it is and beside a load generator. Each finished gate is a line
of the results file; what is there already is not run again, so a run can be stopped and taken up. Other
tools' rules are asked of the very same pairs of runs. The simulation is `gate_simulation.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import gate_simulation
from gate_peers import rules, verdicts

from diagnose.core.phases import Phase
from diagnose.gate.cause import Kind
from diagnose.gate.compare_commits import GateRequest, compare_versions
from diagnose.gate.in_turns import KEEPS_FREED
from diagnose.gate.pairs import Asked
from diagnose.gate.result import GateResult, Verdict
from diagnose.gate.why import why_of

JOB = Path(__file__).with_name("gate_job.py")
PHASE_OF = {
    "data": Phase.DATA_WAIT,
    "forward": Phase.FORWARD,
    "backward": Phase.BACKWARD,
    "optimizer": Phase.OPTIMIZER,
    "checkpoint": Phase.CHECKPOINT,
}
SIZES = (0.03, 0.05, 0.10)
TURNS = "under load, in turns"
"""With `--in-turns`, which is what the gate itself advises there."""

SCENES = ("as it is", "under load", TURNS)
MAX_DROP = 0.03
SEED = 20261121
"""Of the simulation: that which `gate_simulation.py` takes by itself."""

LOAD = """
import random, time
while True:
    time.sleep(random.expovariate(1 / 1.5))
    until = time.perf_counter() + min(3, 0.1 * random.paretovariate(1.3))
    while time.perf_counter() < until:
        pass
"""
"""A neighbour: bursts of work, mostly short, some of seconds, on one CPU, a quarter of the time or so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One gate to run.

    Attributes:
        number: Its place among those alike.
        phase: What is made slower; empty for A/A.
        size: By what part of the step.
    """

    scene: str
    number: int
    phase: str = ""
    size: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.scene}/{self.phase or 'same'}/{self.size:g}/{self.number}"


def cases(scenes: Iterable[str], same: int, slowed: int) -> list[Case]:
    """Returns the gates, shuffled, always alike, so that any beginning holds something of each sort."""
    kinds = [(phase, size) for size in SIZES for phase in PHASE_OF]
    every = []
    for scene in scenes:
        every += [Case(scene=scene, number=i) for i in range(same)]
        for i in range(slowed):
            phase, size = kinds[i % len(kinds)]
            every.append(Case(scene=scene, number=i // len(kinds), phase=phase, size=size))
    random.Random(SEED).shuffle(every)
    return every


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--same", type=int, default=15, help="A/A gates in each scene")
    parser.add_argument("--slowed", type=int, default=15, help="gates with a slowdown in each scene")
    parser.add_argument("--scenes", nargs="+", default=list(SCENES), choices=SCENES)
    parser.add_argument("--results", type=Path, help="file of results, to go on with")
    parser.add_argument("--part", default="1/1", help="1/2 and 2/2: two at once, by taskset on a CPU each")
    parser.add_argument("--steps", type=int, help="steps in each run; as the gate chooses without it")
    parser.add_argument("--max-pairs", type=int, default=20)
    parser.add_argument("--trials", type=int, default=1000, help="of the simulation; 0 leaves it out")
    parser.add_argument("--quick", action="store_true", help="two gates, as the machine is; no simulation")
    parser.add_argument("--report", action="store_true", help="run nothing more")
    args = parser.parse_args()
    if args.quick:
        args.same, args.slowed, args.scenes, args.trials = 1, 1, SCENES[:1], 0
    done = read(args.results)
    if not args.report:
        part, parts = map(int, args.part.split("/"))
        for case in cases(args.scenes, args.same, args.slowed)[part - 1 :: parts]:
            if case.key in done:
                continue
            done[case.key] = judged(case, args.steps, args.max_pairs)
            print(case.key, done[case.key]["verdict"], file=sys.stderr, flush=True)
            if args.results:
                with args.results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[case.key]) + "\n")
    print(page(list(done.values()), args.trials))


def read(path: Path | None) -> dict[str, dict[str, Any]]:
    """Returns the results so far by the key of their case."""
    if path is None or not path.exists():
        return {}
    return {row["key"]: row for row in map(json.loads, path.read_text(encoding="utf-8").splitlines())}


def judged(case: Case, steps: int | None, max_pairs: int) -> dict[str, Any]:
    """Runs one gate and returns what it and the others said, beside the truth."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= KEEPS_FREED  # as the gate advises where runs differ in this
    with tempfile.TemporaryDirectory() as folder, neighbours(case.scene != SCENES[0]):
        truth = Path(folder) / "truth"
        truth.mkdir()
        os.environ["GATE_TRUTH"] = str(truth)
        head: tuple[str, ...] = (str(JOB),)
        if case.phase:
            step_us = calibrated(truth)
            head = (*head, "--slow", case.phase, "--extra-us", f"{case.size * step_us:.1f}")
        request = GateRequest(
            asked=Asked(max_drop=MAX_DROP, steps=steps, max_pairs=max_pairs, in_turns=case.scene == TURNS),
            commands=((str(JOB),), head),
            cwd=Path(folder),
            folder=Path(folder) / "runs",
        )
        result = compare_versions(request)
        return row_of(case, result, truth)


def calibrated(truth: Path) -> float:
    """Returns the microseconds of a step without a slowdown, over three runs."""
    for _ in range(3):
        subprocess.run([sys.executable, str(JOB), "--steps", "150"], check=True, capture_output=True)
    times = [json.loads(path.read_text())["step_us"] for path in truth.iterdir()]
    for path in truth.iterdir():
        path.unlink()
    return statistics.median(times)


def row_of(case: Case, result: GateResult, truth: Path) -> dict[str, Any]:
    """Returns a line of the results."""
    shares = [
        row["extra_share"]
        for row in map(json.loads, (f.read_text() for f in truth.iterdir()))
        if row["slow"]
    ]
    judgement = result.judgement
    row: dict[str, Any] = {
        "key": case.key,
        "scene": case.scene,
        "phase": case.phase,
        "size": case.size,
        "verdict": result.verdict.value,
        "pairs": len(result.pairs),
        "truth": statistics.median(shares) if shares else 0.0,
        "drop": judgement.drop if judgement is not None and judgement.pairs else None,
        "beside": {each.metric.value: each.verdict.value for each in result.beside},
        "wall_s": round(result.wall_s),
        "figures": [
            [
                {metric.value: float(f"{figure:.6g}") for metric, figure in run.figures.items()}
                for run in runs
            ]
            for runs in ((pair.base, pair.head) for pair in result.pairs)
        ],
        "others": verdicts(result.pairs, MAX_DROP),
        "cpus": num_cpus(),
        "version": version(),
        "machine": platform.machine(),
        "day": str(date.today()),
    }
    if result.verdict is Verdict.REGRESSION:
        why = why_of(result.pairs, result.metric)
        row |= {"why": why.kind.value, "named": [each.phase.value for each in why.phases]}
    return row


@contextlib.contextmanager
def neighbours(wanted: bool) -> Iterator[None]:
    """Keeps one burst of work after the other going beside the runs."""
    number = num_cpus() if wanted else 0
    others = [subprocess.Popen([sys.executable, "-c", LOAD]) for _ in range(number)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def num_cpus() -> int:
    """Returns how many CPUs this process and its runs may use."""
    return len(os.sched_getaffinity(0))


def version() -> str:
    """Returns the commit that is measured; empty outside git."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=JOB.parent, capture_output=True, text=True).stdout.strip()


def page(rows: list[dict[str, Any]], trials: int) -> str:
    """Returns the page of docs: the real runs, then the simulation."""
    lines = ["# How often the gate errs", ""]
    if rows:
        days = sorted({row["day"] for row in rows})
        lines += [
            f"`python benchmarks/gate.py`, {' to '.join(dict.fromkeys((days[0], days[-1])))}, no GPU, "
            f"{rows[0]['machine']}, CPUs of each gate: {rows[0]['cpus']}. {len(rows)} gates of real runs; "
            f"at most {MAX_DROP:.0%} may be lost. Added time is measured in the runs themselves, as a part "
            "of the rest of their step. "
            "The other tools' rules are asked of the same pairs of runs, one pair at a time, as they work; "
            "they know no 'cannot tell'.",
            "",
            *real_table(rows),
            "",
            *attribution(rows),
        ]
    else:
        lines.append(
            "No real runs are on this page: it was printed without results of `benchmarks/gate.py`."
        )
    if trials:
        text, _ = gate_simulation.everything(trials, SEED)
        lines += [
            "",
            "## Simulated runs",
            "",
            f"`python benchmarks/gate_simulation.py --trials {trials}`",
            "",
            text,
        ]
    return "\n".join(lines)


def real_table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rules())
    head = ["machine", "added", "measured", "gates", "pass", "regression", "cannot tell", "pairs", *names]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for scene in SCENES:
        for size in (0.0, *SIZES):
            some = [row for row in rows if row["scene"] == scene and row["size"] == size]
            if not some:
                continue
            said = [row["verdict"] for row in some]
            cells = [
                scene,
                f"{size:.0%}" if size else "nothing",
                f"{statistics.median(row['truth'] for row in some):.1%}" if size else "",
                str(len(some)),
                *(str(said.count(verdict)) for verdict in ("pass", "regression", "inconclusive")),
                f"{statistics.mean(row['pairs'] for row in some):.1f}",
                *(
                    share([alarm for row in some for alarm in row["others"].get(name, ())])
                    for name in names
                ),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", "The last columns are the part of single pairs that the rule fails."]


def attribution(rows: list[dict[str, Any]]) -> list[str]:
    """Says in how many regressions that were one the phase was named."""
    true = [row for row in rows if row["verdict"] == "regression" and row["phase"]]
    if not true:
        return ["No regression was found, so none was attributed."]
    right = [
        row["why"] == Kind.PHASES.value and row["named"][:1] == [PHASE_OF[row["phase"]].value]
        for row in true
    ]
    lines = [
        f"Of {len(true)} regressions found, the phase that was made slower is named first in {sum(right)}."
    ]
    wrong = [row for row, is_right in zip(true, right, strict=True) if not is_right]
    lines += [
        f"- {row['key']}: {', '.join(row['named']) or 'none'} ({row['why'].replace('_', ' ')})"
        for row in wrong
    ]
    return lines


def share(alarms: list[bool]) -> str:
    return f"{sum(alarms) / len(alarms):.0%}" if alarms else "-"


if __name__ == "__main__":
    random.seed(0)
    main()
