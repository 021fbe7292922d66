"""The kernels beside every other optimizer that can be had, on one GPU, in one process.

    python benchmarks/gpu/optimizers.py --out out [--minutes 4] [--rows A B ...]
    python benchmarks/gpu/optimizers.py --out out --dry-run     # on a CPU: the logic alone, no times
    python benchmarks/gpu/optimizers.py --byte-model            # what is read and written, by count

Correctness against float64 comes before timing; contenders take turns; the most telling cases come first,
and what there was no time for is named. The process that measures is a child of this one: if a kernel
breaks the device for it, or it hangs, the case is noted as failed and another child goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from optimizer_report import write

ROOT = Path(__file__).parents[2]

CASES = (
    "B/Llama-1B",
    "A/Llama-1B",
    "B/1000 x 1024",
    "C/GPT-2",
    "B0/GPT-2",
    "A/GPT-2",
    "E/Llama-7B/8",
    "F/Llama-1B",
    "D/Llama-1B",
    "G/GPT-2",
    "H/GPT-2",
    "I/Llama-1B",
    "I/10000 x 64",
    "A/10 x 16.8 M",
    "A/10000 x 64",
    "A/1000 x 1024",
    "B/GPT-2/compiled",
    "A/GPT-2/compiled",
    "C/Llama-1B",
    "B0/Llama-1B",
    "A/ResNet-50",
    "G/ResNet-50",
    "E/1000 x 1024",
    "F/1000 x 1024",
    "B/Llama-1B/compiled",
    "F/GPT-2/compiled",
    "E/GPT-2/compiled",
)
"""Row and parameters, the most telling first."""

DRY_CASES = tuple(f"{row}/tiny/compiled" for row in ("A", "B", "B0", "C", "D", "E", "F", "G", "H", "I"))

SECONDS_PER_CASE = 9.0

HUNG_S = 150.0
"""Without a word for so long, a child is taken for dead: compiling the largest graph takes less."""

COMPILING_S = 75.0
"""A case in which something compiles is not begun with less time left."""

MOST_CHILDREN = 6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rows", nargs="+", help="only these rows, such as A B0")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--byte-model", action="store_true", help="only print the table of bytes")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--cases", nargs="+", help="only these, such as A/GPT-2")
    args = parser.parse_args()
    if args.byte_model:
        print("\n".join(byte_model()))
        return 0
    cases = list(args.cases or (DRY_CASES if args.dry_run else CASES))
    if args.rows:
        cases = [case for case in cases if case.partition("/")[0] in args.rows]
    if not cases:
        parser.error(f"no case is of the rows {' '.join(args.rows)}")
    deadline = time.monotonic() + 60 * args.minutes
    if args.child:
        sys.path.insert(0, str(ROOT))  # for `diagnose`, and for the emulation of the tests
        measure(cases, args.child, deadline, dry_run=args.dry_run)
        return 0
    report = conduct(cases, args.out, deadline, dry_run=args.dry_run)
    bad = [case["case"] for case in report["cases"] if case.get("failure") or ours_failed(case)]
    measured = sum("contenders" in case for case in report["cases"])
    print(f"{measured} of {len(cases)} cases measured; failed: {', '.join(bad) or 'none'}")
    return int(bool(bad) or not measured)


def byte_model() -> list[str]:
    """The lines of a table: the bytes that each contender reads and writes for each element in a step."""
    sys.path.insert(0, str(ROOT))
    from optimizer_rows import ROWS

    lines = ["| row | what | contender | bytes per element | of the least |", "|---|---|---|--:|--:|"]
    for row in ROWS:
        counted = [each for each in row.contenders if each.bytes_per_element is not None]
        least = min(each.bytes_per_element or 0 for each in counted)
        for each in counted:
            name = f"**{each.name}**" if each.ours else each.name
            ratio = (each.bytes_per_element or 0) / least
            lines.append(
                f"| {row.letter} | {row.title} | {name} | {each.bytes_per_element:g} | {ratio:.2f} |"
            )
    return lines


def ours_failed(case: dict[str, Any]) -> bool:
    """Whether a kernel of ours could not be measured: of the others, each may be missing."""
    return any(each["ours"] and each["status"] != "measured" for each in case.get("contenders", ()))


def conduct(cases: list[str], out: Path, deadline: float, *, dry_run: bool) -> dict[str, Any]:
    """Runs children until all cases are done or time is up; writes after each case what is known."""
    out.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"dry_run": dry_run, "machine": {}, "cases": [], "not_reached": cases}
    pending = cases
    broke = True
    for _ in range(MOST_CHILDREN):
        if not broke or not pending or time.monotonic() > deadline:
            break
        with tempfile.TemporaryDirectory() as folder:
            pending, broke = supervise(pending, Path(folder) / "lines", out, deadline, report)
    report["not_reached"] = pending
    write(report, out)
    return report


def supervise(
    pending: list[str], lines: Path, out: Path, deadline: float, report: dict[str, Any]
) -> tuple[list[str], bool]:
    """Runs one child and reads what it writes; returns the cases that are still to be done, and whether the
    child broke: then another has to go on with them."""
    minutes = max(0.1, (deadline - time.monotonic()) / 60)
    command = [
        sys.executable,
        __file__,
        "--child",
        str(lines),
        "--minutes",
        str(minutes),
        "--cases",
        *pending,
    ]
    command += ["--dry-run"] if report["dry_run"] else []
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    child = subprocess.Popen(command, env=environment)
    heard, seen, begun = time.monotonic(), 0, ""
    while True:
        ended = child.poll() is not None
        written = lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []
        for line in written[seen:]:
            seen, heard = seen + 1, time.monotonic()
            found = json.loads(line)
            report["machine"] |= found.get("machine", {})
            begun = found.get("begun", begun)
            if "contenders" in found:
                report["cases"].append(found)
                pending, begun = [case for case in pending if case != found["case"]], ""
                write(report | {"not_reached": pending}, out)
        if ended:
            break
        if time.monotonic() > min(heard + HUNG_S, deadline + 60):
            child.kill()
            child.wait()
        time.sleep(0.2)
    if child.returncode and not begun:  # not even the first: another child would fare no better
        report["cases"].append({"case": "start", "failure": f"the child exited with {child.returncode}"})
        return pending, False
    if child.returncode:
        failure = f"the child exited with {child.returncode}; its log says why"
        report["cases"].append({"case": begun, "failure": failure})
        pending = [case for case in pending if case != begun]
    return pending, child.returncode != 0


def measure(cases: list[str], lines: Path, deadline: float, *, dry_run: bool) -> None:
    """In the child: measures case after case, and writes a line for each."""
    import torch
    from optimizer_case import run_case
    from optimizer_clock import clock_for
    from optimizer_rows import ROWS

    rows = {row.letter: row for row in ROWS}
    with lines.open("a", encoding="utf-8") as file, clock_for(dry_run=dry_run) as clock:

        def say(**found: Any) -> None:
            file.write(json.dumps(found) + "\n")
            file.flush()

        say(
            machine={
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "device": "CPU, emulating" if dry_run else torch.cuda.get_device_name(),
                "copy_bytes_per_s": clock.copy_bytes_per_s(),
            }
        )
        for case in cases:
            left = deadline - time.monotonic()
            letter, _, shape = case.partition("/")
            with_compiled = shape.endswith("/compiled")
            if left < (0 if dry_run else COMPILING_S if with_compiled else 3):
                continue
            say(begun=case)
            print(f"{case}: {left:.0f} s are left", flush=True)
            begun = time.monotonic()
            seconds = 0.0 if dry_run else min(SECONDS_PER_CASE, left)
            found = run_case(
                rows[letter],
                shape.removesuffix("/compiled"),
                clock,
                seconds,
                with_compiled=with_compiled,
            )
            say(case=case, seconds=time.monotonic() - begun, **found)
            if not dry_run:
                torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
