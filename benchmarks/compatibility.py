"""Is a script under `diagnose run` the same program as under plain Python?

Runs every script of `compatibility_cases.py` in both arms, in the same folder, and compares exit code,
standard output, standard error, final weights and the number of steps found. Prints a markdown table on
stdout, what differed on stderr, and exits 1 if anything did:

    python benchmarks/compatibility.py --sources SOURCES > docs/compatibility.md

`benchmarks/foreign/README.md` says how to get the scripts that were not written here.
"""

from __future__ import annotations

import argparse
import datetime
import difflib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from compatibility_arms import Arm, missing, run_arm
from compatibility_cases import CASES, EXAMPLES, NANOGPT, ROOT, Case, Launch

MAX_DIFF_LINES = 20
END_BLOCK = "\ndiagnose: "
"""How the words of ours that may follow the script's begin."""

LEDGER_TOLERANCE = 1e-6
"""How far the sum of all shares may be from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table; `problems` is empty when all was the same."""

    case: Case
    cells: tuple[str, ...]
    problems: tuple[str, ...] = ()


def stdout_lines(case: Case, arm: Arm) -> list[str]:
    text = re.sub(case.varies, "~", arm.stdout) if case.varies else arm.stdout
    lines = text.split("\n")
    return sorted(lines) if case.unordered else lines


def without_numbers(text: str) -> str:
    """Process ids, time stamps and rates are among what a script writes to standard error."""
    return re.sub(r"\d+(\.\d+)?", "#", text)


def same_stderr(case: Case, plain: Arm, ours: Arm) -> bool:
    """Whether the script's words come first and whole, and only our end block follows."""
    before, after = without_numbers(plain.stderr), without_numbers(ours.stderr)
    if case.launch is Launch.PYTHON and not case.unordered:
        return after.startswith(before + END_BLOCK)
    script, block, _ = after.partition(END_BLOCK)  # ranks write in any order
    return bool(block) and sorted(script.split("\n")) == sorted(before.split("\n"))


def diff(title: str, before: Sequence[str], after: Sequence[str]) -> Iterator[str]:
    lines = difflib.unified_diff(before, after, "plain", "diagnose", n=0)
    for line, _ in zip(lines, range(MAX_DIFF_LINES), strict=False):
        yield f"  {title}: {line.rstrip()}"


def compare(case: Case, plain: Arm, ours: Arm) -> Row:
    """Fills a row of the table from the two arms."""
    problems: list[str] = []

    def cell(same: bool, what: str, details: Iterable[str] = ()) -> str:
        if not same:
            problems.extend([f"{what} differs", *details])
        return "same" if same else "**differs**"

    if plain.exit_code != 0:
        problems += [
            f"plain Python ended with {plain.exit_code}",
            *plain.stderr.split("\n")[-MAX_DIFF_LINES:],
        ]
    codes = [f"  exit code: plain {plain.exit_code}, diagnose {ours.exit_code}"]
    before, after = stdout_lines(case, plain), stdout_lines(case, ours)
    errors = diff("stderr", plain.stderr.split("\n"), ours.stderr.split("\n"))
    cells = [
        cell(plain.exit_code == ours.exit_code, "exit code", codes),
        cell(before == after, "stdout", diff("stdout", before, after)),
        cell(same_stderr(case, plain, ours), "stderr", errors),
    ]
    lost = [name for name, value in plain.weights.items() if value == "missing"]
    if lost:
        problems.append(f"plain Python left no {', '.join(lost)}")
    changed = (f"  weights: {name}" for name, value in ours.weights.items() if value != plain.weights[name])
    cells.append(cell(plain.weights == ours.weights, "weights", changed) if case.weights else "races")

    if ours.report is None:
        problems.append("no JSON report came out")
        return Row(case=case, cells=(*cells, f"- / {case.steps}", "-", "-"), problems=tuple(problems))
    count = ours.report["steps"]["count"]
    if count != case.steps:
        problems.append(f"{count} steps found, {case.steps} expected (status {ours.report['status']})")
    cells.append(f"{count} / {case.steps}" if count == case.steps else f"**{count}** / {case.steps}")
    phases = {phase["name"]: phase["share"] for phase in ours.report["phases"]}
    total = sum(share for share in phases.values() if share is not None)
    if not phases or abs(total - 1) > LEDGER_TOLERANCE:
        problems.append(f"shares sum to {total!r} (status {ours.report['status']})")
        return Row(case=case, cells=(*cells, f"**{total:.6f}**", "-"), problems=tuple(problems))
    if phases["evaluation"] > phases["forward"] + phases["backward"]:  # no script here evaluates that much
        problems.append(f"{phases['evaluation']:.0%} of the time is called evaluation")
    largest = sorted(phases, key=lambda name: -(phases[name] or 0))[:2]
    summary = ", ".join(f"{name} {phases[name]:.0%}" for name in largest)
    return Row(case=case, cells=(*cells, "closes", summary), problems=tuple(problems))


def run_case(case: Case, sources: Path | None, scratch: Path) -> Row:
    lacking = missing(case, sources)
    if lacking:
        return Row(case=case, cells=(f"not run: missing {lacking}", *[""] * 6))
    plain = run_arm(case, sources, scratch, measured=False)
    row = compare(case, plain, run_arm(case, sources, scratch, measured=True))
    if not row.problems:
        return row
    again = run_arm(case, sources, scratch, measured=False)
    if (stdout_lines(case, again), again.weights) == (stdout_lines(case, plain), plain.weights):
        return row
    return replace(row, problems=(*row.problems, "plain Python differs from itself"))


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{cores} cores, {gpu}, {platform.system()}"


def commit(folder: Path) -> str:
    """Returns which commit a checkout is at, and whether files of it were changed since."""
    git = [
        "git",
        "-C",
        str(folder),
        "describe",
        "--always",
        "--exclude=*",
        "--abbrev=12",
        "--dirty=, changed",
    ]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def heading(sources: Path | None) -> str:
    names = sorted({"torch", *(name for case in CASES for name in case.requires)})
    versions = [f"diagnose at {commit(ROOT)}", f"Python {platform.python_version()}"]
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    for source in (NANOGPT, EXAMPLES):
        if sources and (sources / source).is_dir():
            versions.append(f"{source.replace('+', '/')} at {commit(sources / source)}")
    return f"{datetime.date.today().isoformat()}; {machine()}; {', '.join(versions)}."


INTRODUCTION = """\
# Compatibility

Each script ran twice in the same folder, by plain Python and under `diagnose run`, with the same seed and
environment. Printed by `benchmarks/compatibility.py`; `benchmarks/foreign/README.md` says where the scripts
come from. {heading}

Exit code, standard output (to the byte) and files of weights (to the bit, with the optimizer's state where
the script saves it) must be the same. Standard error must come first and whole, with our one end block
behind it; numbers are left out of that comparison: process ids, time stamps and rates are among them.
*Steps* are those found and those that the script takes. *Ledger* closes when the shares of all phases sum
to 1 within {tolerance:g}. *Largest phases* is for the curious: the machine was shared, and small steps on
two threads suffer from it. (`benchmarks/attribution.py` is where phases are checked.)

| script | exit code | stdout | stderr | weights | steps | ledger | largest phases |
|---|---|---|---|---|---|---|---|"""


def footnotes(cases: Sequence[Case]) -> Iterator[str]:
    """Says what was left out of a comparison, and how both arms were started."""
    remarks: dict[str, list[str]] = {}

    def remark(text: str) -> None:
        remarks.setdefault(text, []).append(case.name)

    for case in cases:
        if case.varies:
            order = ", and lines may come in any order" if case.unordered else ""
            remark(f"differs from run to run and is left out: `{case.varies}`{order}.")
        if case.launch is not Launch.PYTHON:
            remark(f"`torchrun S` against `{case.launch.value}`.")
        if not case.weights:
            remark("the processes race for the weights, which are not compared.")
    for text, names in remarks.items():
        yield f"- {'; '.join(names)}: {text}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, help="folder with the checkouts, each named owner+name")
    parser.add_argument("--only", metavar="NAME", help="run the cases whose name contains this")
    args = parser.parse_args()
    cases = [case for case in CASES if not args.only or args.only in case.name]
    if not cases:
        parser.error(
            f"no case is called {args.only!r}; there are: {', '.join(case.name for case in CASES)}"
        )
    sources = args.sources.resolve() if args.sources else None

    failed = False
    print(INTRODUCTION.format(heading=heading(sources), tolerance=LEDGER_TOLERANCE), flush=True)
    with tempfile.TemporaryDirectory(prefix="compatibility-") as scratch:
        for case in cases:
            row = run_case(case, sources, Path(scratch))
            print("|", " | ".join([case.name, *row.cells]), "|", flush=True)
            for problem in row.problems:
                failed = True
                print(problem if problem.startswith(" ") else f"{case.name}: {problem}", file=sys.stderr)
    print()
    print("\n".join(footnotes(cases)))
    sys.exit(failed)


if __name__ == "__main__":
    main()
