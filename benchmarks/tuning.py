"""What does `diagnose run --tune` win, what does it cost, and does it leave alone what has no fault?

    python benchmarks/tuning.py > docs/tuning-results.md        [--only NAME ...] [--rounds 3] [--no-search]
    python benchmarks/tuning.py --answers tuning.jsonl          (killed, it goes on where it was)

For each job of `benchmarks/tuning/` (they know nothing of diagnose):

- *plain* and *tuned* runs in turn, as many rounds as asked for: the wall time of the whole script, the
  speedup that tuning confirmed (all kept fixes on against off, in pairs of windows; all but the last where
  the script ended before; "not reached" where it ended before any), what it kept, and how many steps it
  spent on trials. All steps train.
- *offline best*: each setting of `search` alone, and the best ones together, are put in force without
  trials (`diagnose run --apply`), each with its own paired confirmation: what somebody who tried everything
  beforehand would have found, by the time of a step. The fastest of many is partly so by chance: it is
  measured once more in each round, and these figures alone count. *of best* is what tuning reached of them:
  the step with the best settings against that with what was kept, in the same round, median. Speedups are
  not compared: what a step takes with everything off is not the same in both, as memory that fixes have
  fetched once stays with the process when they are off.
- *numbers*: whether the tuned run ended with the plain run's weights, bit for bit, as it must where all
  fixes are exact; else how far the final losses are apart.

A null job has no fault: tuning should keep nothing, and cost nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

JOBS = Path(__file__).with_name("tuning")
TIMEOUT_S = 900
TOLD = ("confirmation", "earlier_confirmation", "trials", "steps")
"""Parts of a report that the page is made of."""


class Answers:
    """What was measured so far, kept in a file, a line of JSON each.

    A file is of one version of `diagnose`, and of one machine: delete it when either has changed.

    Args:
        path: The file; `None` keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[str, Any] = {}
        lines = path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError):  # cut off when the benchmark was killed
                self._known.update(json.loads(line))

    def of(self, key: str, measure: Callable[[], Any]) -> Any:
        """Returns what is known under a key, or measures it."""
        if key not in self._known:
            print(key, file=sys.stderr)
            self._known[key] = measure()
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({key: self._known[key]}) + "\n")
        return self._known[key]


@dataclass(frozen=True)
class Workload:
    """One job, and what the offline search tries on it."""

    name: str
    about: str
    args: list[str]
    script: str
    search: tuple[str, ...] = ()
    search_part: float = 0.25
    exact: bool = False
    null: bool = False
    ranks: int = 1


@dataclass
class Run:
    """One run of a job: its wall time, what it printed, and the report where `diagnose` ran it."""

    seconds: float
    printed: str
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def confirmation(self) -> dict[str, Any] | None:
        """Of all that was kept, or of all but what was kept last where the script ended before that."""
        return self.report.get("confirmation") or self.report.get("earlier_confirmation")

    @property
    def confirmed(self) -> float | None:
        return self.confirmation["speedup"] if self.confirmation else None

    @property
    def kept(self) -> list[str]:
        return [named(trial) for trial in self.report["trials"] if trial["state"] == "kept"]

    @property
    def trial_steps(self) -> int:
        return sum(trial["steps_spent"] for trial in self.report["trials"])


def named(trial: dict[str, Any]) -> str:
    value = trial["value"]
    return trial["action"] if value is None else f"{trial['action']}={value}"


def workloads() -> list[Workload]:
    """Reads `workloads.toml`."""
    toml = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table = toml.loads((JOBS / "workloads.toml").read_text(encoding="utf-8"))
    return [
        Workload(name=name, **{"script": name, **each, "search": tuple(each.get("search", ()))})
        for name, each in table.items()
    ]


def run(workload: Workload, *options: str) -> Run:
    """Runs a job: plain without options, else under `diagnose run` with them."""
    with tempfile.TemporaryDirectory() as folder:
        script = [str(JOBS / f"{workload.script}.py"), *workload.args]
        ranks = workload.ranks
        if not options:
            launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
            command = [sys.executable, *launcher, *script]
        else:
            report = ["--json", f"{folder}/report.json", "--run-dir", folder, "--quiet"]
            several = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
            command = [sys.executable, "-m", "diagnose", "run", *options, *report, *several, *script]
        begun = time.perf_counter()
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=folder
        )
        seconds = time.perf_counter() - begun
        if ended.returncode:
            raise SystemExit(f"{workload.name} {' '.join(options)} failed:\n{ended.stderr[-2000:]}")
        text = Path(folder, "report.json")
        found = json.loads(text.read_text(encoding="utf-8")) if text.exists() else {}
        found = {name: found[name] for name in TOLD if name in found}
        return Run(seconds=seconds, printed=ended.stdout.strip().splitlines()[-1], report=found)


def shorter(workload: Workload) -> Workload:
    """A part of the steps: enough to put a setting in force and to confirm it."""
    args = list(workload.args)
    steps = args.index("--steps") + 1
    args[steps] = str(int(int(args[steps]) * workload.search_part))
    return replace(workload, args=args)


def applied(workload: Workload, settings: tuple[str, ...]) -> dict[str, Any] | None:
    """Returns the confirmation of settings put in force without trials; `None` if one was refused."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tuned.toml")
        lines = []
        for setting in settings:
            name, _, value = setting.partition("=")
            lines += ["[[action]]", f'name = "{name}"', *([f"value = {value}"] if value else [])]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        found = run(shorter(workload), "--apply", str(file))
    refused = [trial for trial in found.report["trials"] if trial["state"] != "kept"]
    for trial in refused:
        print(f"  {named(trial)}: {trial['state']}: {trial['reason']}", file=sys.stderr)
    return None if refused else found.confirmation


def offline_best(workload: Workload, answers: Answers) -> tuple[str, ...]:
    """Tries every setting alone, then those that helped together, one of each action; returns the best,
    none where nothing helps."""

    def step_of(settings: tuple[str, ...]) -> float | None:
        key = f"{workload.name} with {' + '.join(settings)}"
        found = answers.of(key, lambda: applied(workload, settings))
        return found["step_ms"][1] if found and found["speedup"] > 1.0 else None

    steps = {setting: step_of((setting,)) for setting in workload.search}
    helps = {setting: step for setting, step in steps.items() if step is not None}
    measured = [(step, (setting,)) for setting, step in helps.items()]
    actions = sorted({setting.partition("=")[0] for setting in helps})
    top = [min((s for s in helps if s.partition("=")[0] == a), key=lambda s: helps[s]) for a in actions]
    for count in range(2, len(top) + 1):
        for together in itertools.combinations(top, count):
            step = step_of(together)
            if step is not None:
                measured.append((step, together))
    return min(measured)[1] if measured else ()


@dataclass
class Row:
    """What was measured of one job.

    Attributes:
        best: The settings that were fastest in the offline search; `None` where there was none.
        again: Their confirmation in each round; `None` where there is none.
    """

    workload: Workload
    plain: list[Run]
    tuned: list[Run]
    best: tuple[str, ...] | None
    again: list[dict[str, Any] | None]

    @property
    def confirmed(self) -> float:
        """The median of the confirmed speedups; 1 where nothing was kept, or the script ended before."""
        return statistics.median(each.confirmed or 1.0 for each in self.tuned)

    @property
    def of_best(self) -> float:
        """What is reached of the best settings: see the module."""
        parts = []
        for tuned, best in zip(self.tuned, self.again, strict=True):
            off_ms, best_ms = best["step_ms"] if best else (1.0, 1.0)
            parts.append(best_ms / (tuned.confirmation["step_ms"][1] if tuned.confirmation else off_ms))
        return statistics.median(parts)

    @property
    def wall(self) -> list[float]:
        return [p.seconds / t.seconds for p, t in zip(self.plain, self.tuned, strict=True)]

    def cells(self) -> list[str]:
        confirmed = [each.confirmed for each in self.tuned if each.confirmed]
        kept = sorted({" + ".join(each.kept) or "nothing" for each in self.tuned})
        best, of_best = "-", "-"
        if self.best is not None:
            speedups = [each["speedup"] if each else 1.0 for each in self.again]
            best = f"{spread(speedups, 'x')} {' + '.join(self.best) or 'nothing'}"
            of_best = f"{self.of_best:.0%}"
        return [
            self.workload.name,
            spread(confirmed, "x")
            if confirmed
            else "not reached"
            if any(r.kept for r in self.tuned)
            else "-",
            "; ".join(kept),
            best,
            of_best,
            spread(self.wall, "x"),
            f"{statistics.median(each.trial_steps for each in self.tuned):,.0f}"
            f" of {self.tuned[0].report['steps']['count']:,}",
            self.numbers(),
        ]

    def numbers(self) -> str:
        pairs = list(zip(self.plain, self.tuned, strict=True))
        if all(plain.printed == tuned.printed for plain, tuned in pairs):
            return "same bits"
        losses = [abs(_loss(t) - _loss(p)) / max(abs(_loss(p)), 1e-12) for p, t in pairs]
        return f"loss {max(losses):.1e} off" + (" (EXACT EXPECTED)" if self.workload.exact else "")


def _loss(each: Run) -> float:
    return float(each.printed.rpartition(" ")[2])


def spread(values: list[float], unit: str) -> str:
    """Median and range."""
    middle = f"{statistics.median(values):.2f}{unit}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-search", action="store_true", help="leave out the offline search")
    parser.add_argument("--answers", type=Path, help="keep what was measured in this file")
    args = parser.parse_args()
    answers = Answers(args.answers)
    rows = []
    for workload in workloads():
        if args.only and workload.name not in args.only:
            continue
        plain, tuned, again = [], [], []
        searches = bool(workload.search) and not args.no_search
        best = offline_best(workload, answers) if searches else None
        for number in range(args.rounds):
            for kind in ("plain", "tuned") if number % 2 == 0 else ("tuned", "plain"):
                options = ["--tune"] if kind == "tuned" else []
                measured = functools.partial(measure, workload, options)
                each = Run(**answers.of(f"{workload.name} {kind}, round {number + 1}", measured))
                (tuned if options else plain).append(each)
            if best is not None:
                key = f"{workload.name} at its best, round {number + 1}"
                again.append(answers.of(key, functools.partial(applied, workload, best)) if best else None)
        rows.append(Row(workload=workload, plain=plain, tuned=tuned, best=best, again=again))
    print(table(rows, args.rounds))


def measure(workload: Workload, options: list[str]) -> dict[str, Any]:
    """Runs a job, and says on stderr what it took and what came of the trials."""
    measured = run(workload, *options)
    print(f"  {measured.seconds:.1f} s", file=sys.stderr)
    for trial in measured.report.get("trials", ()):
        gain = trial["measured_speedup"]
        told = f"{gain:.2f}x" if gain else trial["reason"]
        print(f"  {named(trial)}: {trial['state']} {told}", file=sys.stderr)
    return asdict(measured)


def machine() -> str:
    """Returns what the figures were measured on."""
    import torch

    cpus, python = len(os.sched_getaffinity(0)), platform.python_version()
    return f"{cpus} CPUs, {platform.machine()}, no GPU, Python {python}, torch {torch.__version__}"


def table(rows: list[Row], rounds: int) -> str:
    """Returns the page."""
    header = [
        "job",
        "confirmed",
        "kept",
        "offline best",
        "of best",
        "wall, plain/tuned",
        "trial steps",
        "numbers",
    ]
    lines = [
        "# What tuning wins",
        "",
        f"`python benchmarks/tuning.py --rounds {rounds}`, {date.today()}, {machine()}. Median and range of"
        f" {rounds} rounds, plain and tuned runs in turn; the script says what each column is.",
        "",
        *(f"- **{row.workload.name}**: {row.workload.about}." for row in rows),
        "",
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row.cells()) + " |" for row in rows),
        "",
    ]
    faulty = [row for row in rows if not row.workload.null]
    nulls = [row for row in rows if row.workload.null]
    if faulty:
        mean = math.exp(statistics.fmean(math.log(row.confirmed) for row in faulty))
        lines.append(
            f"Geometric mean of the confirmed speedup of jobs with a fault, 1 where none was: {mean:.2f}x."
        )
    if nulls:
        kept = sum(bool(each.kept) for row in nulls for each in row.tuned)
        runs = sum(len(row.tuned) for row in nulls)
        wall = statistics.median(ratio for row in nulls for ratio in row.wall)
        lines.append(
            f"Null jobs: something was kept in {kept} of {runs} runs; the whole script took {1 / wall:.2f}"
            " times as long as without us (median; start-up and observation included)."
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
