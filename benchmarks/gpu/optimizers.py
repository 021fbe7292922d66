"""The kernels beside every other optimizer that can be had, on one GPU, in one process.

    python benchmarks/gpu/optimizers.py --out out [--minutes 4] [--rows A B ...]
    python benchmarks/gpu/optimizers.py --prepare all           # compiles what will be needed, many at once
    python benchmarks/gpu/optimizers.py --out out --dry-run     # on a CPU: the logic alone, no times
    python benchmarks/gpu/optimizers.py --byte-model            # what is read and written, by count

Correctness against float64 comes before timing; contenders take turns; the most telling cases come first,
and what there was no time for is named. The process that measures is a child of this one: if a contender
breaks the device for it, or it hangs, that is noted and another child goes on without that contender.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from optimizer_conduct import ROOT, conduct

CASES = (
    # Each row once, where bytes decide
    "B/Llama-1B",
    "A/Llama-1B",
    "B0/Llama-1B",
    "C/Llama-1B",
    "C0/Llama-1B",
    "D/Llama-1B",
    "E/Llama-7B/8",
    "F/Llama-1B",
    "G/GPT-2",
    "H/GPT-2",
    "I/Llama-1B",
    # where the host does
    "B/1000 x 1024",
    "A/1000 x 1024",
    "I/10000 x 64",
    # what compiles
    "B/Llama-1B/compiled",
    "F/Llama-1B/compiled",
    "E/1000 x 1024/compiled",
    "A/GPT-2/compiled",
    "E/GPT-2/compiled",
    "F/1000 x 1024",
    "C/GPT-2",
    "D/GPT-2",
    "B/GPT-2",
    "B0/GPT-2",
    "A/GPT-2",
    "E/1000 x 1024",
    "A/10 x 16.8 M",
    "A/10000 x 64",
    "A/ResNet-50",
    "G/ResNet-50",
    "B/GPT-2/compiled",
    "F/1000 x 1024/compiled",
)
"""Row and parameters, the most telling first."""

DRY_CASES = (
    *(f"{row}/tiny" for row in ("A", "B", "B0", "C", "C0", "D", "E", "F", "G", "H", "I")),
    *(f"{row}/tiny/compiled" for row in ("A", "B", "B0", "E", "F")),
)

SECONDS_PER_CASE, LEAST_SECONDS_PER_CASE = 9.0, 2.0
"""For the contenders' turns: 50 steps of the largest take the first, of a medium one the second."""

BEGIN_S, BEGIN_COMPILING_S = 8.0, 45.0
"""A case is not begun with less time left, and one in which something compiles not with less than the
second: by then its graphs are on the disk, but still have to be traced."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--rows", nargs="+", help="only these rows, such as A B0")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--byte-model", action="store_true", help="only print the table of bytes")
    parser.add_argument("--cases", nargs="+", help="only these, such as A/GPT-2")
    parser.add_argument("--prepare", help="only compile, what `all` or one contender needs")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--without", nargs="+", default=[], help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # for `diagnose`, and for the emulation of the tests
    if args.byte_model:
        print("\n".join(byte_model()))
        return 0
    cases = list(args.cases or (DRY_CASES if args.dry_run else CASES))
    if args.rows:
        cases = [case for case in cases if case.partition("/")[0] in args.rows]
    if not cases:
        parser.error(f"no case is of the rows {' '.join(args.rows)}")
    deadline = time.monotonic() + 60 * args.minutes
    if args.prepare:
        from optimizer_prepare import prepare_all, prepare_one

        if args.prepare == "all":
            return prepare_all(cases, deadline, dry_run=args.dry_run)
        prepare_one(cases[0], args.prepare, dry_run=args.dry_run)
        return 0
    if args.child:
        measure(cases, args.child, deadline, frozenset(args.without), dry_run=args.dry_run)
        return 0
    report = conduct(cases, args.out, deadline, dry_run=args.dry_run)
    bad = [case["case"] for case in report["cases"] if case.get("failure") or ours_failed(case)]
    measured = sum("contenders" in case for case in report["cases"])
    missing = f"; no time for {len(report['not_reached'])}" if report["not_reached"] else ""
    print(f"{measured} of {len(cases)} cases measured; failed: {', '.join(bad) or 'none'}{missing}")
    return int(bool(bad) or not measured)


def byte_model() -> list[str]:
    """The lines of a table: the bytes that each contender reads and writes for each element in a step."""
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


def measure(
    cases: list[str], lines: Path, deadline: float, without: frozenset[str], *, dry_run: bool
) -> None:
    """In the child: measures case after case, and writes a line for each thing that it begins or finds."""
    import torch
    from optimizer_case import Bench, release, run_case
    from optimizer_clock import clock_for
    from optimizer_rows import ROWS

    rows = {row.letter: row for row in ROWS}
    with lines.open("a", encoding="utf-8") as file, clock_for(dry_run=dry_run) as clock:

        def say(**found: Any) -> None:
            file.write(json.dumps(found) + "\n")
            file.flush()

        bench = Bench(clock=clock, tell=say, without=without)
        say(
            machine={
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "device": "CPU, emulating" if dry_run else torch.cuda.get_device_name(),
                "copy_bytes_per_s": clock.copy_bytes_per_s(),
            }
        )
        for number, case in enumerate(cases):
            left = deadline - time.monotonic()
            letter, _, shape = case.partition("/")
            with_compiled = shape.endswith("/compiled")
            if left < (0 if dry_run else BEGIN_COMPILING_S if with_compiled else BEGIN_S):
                continue
            say(begun=case)
            print(f"{case}: {left:.0f} s are left", flush=True)
            begun = time.monotonic()
            share = left / (len(cases) - number)
            found = run_case(
                rows[letter],
                shape.removesuffix("/compiled"),
                bench,
                0.0 if dry_run else min(SECONDS_PER_CASE, max(LEAST_SECONDS_PER_CASE, share)),
                with_compiled=with_compiled,
            )
            say(case=case, seconds=time.monotonic() - begun, **found)
            release(clock)


if __name__ == "__main__":
    sys.exit(main())
