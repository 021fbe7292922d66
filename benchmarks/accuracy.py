"""How often is the cause that `diagnose` names first the one that is there?

Runs the training scripts of `accuracy/` with faults of known size and without, and prints how often the
name, the size and the silence were right, as markdown on stdout; progress goes to stderr:

    python benchmarks/accuracy.py --answers accuracy.jsonl > docs/accuracy.md
    python benchmarks/accuracy.py --set tuning --classes slow-collate,gc-pauses --severities 20,40
    python benchmarks/accuracy.py --quick

With `--floor` the exit code is 1 where fewer of the faults are named first, or any healthy job is not.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from diagnose.gate.in_turns import KEEPS_FREED

# Chance must not decide how much of a step fetches memory from the system: see the rule page-faults. The C
# library reads these when a process starts, and the jobs are forks of this one: it begins anew with them.
if __name__ == "__main__" and not os.environ.keys() >= KEEPS_FREED.keys():
    os.environ.update({name: os.environ.get(name, value) for name, value in KEEPS_FREED.items()})
    os.execv(sys.executable, sys.orig_argv)

from accuracy import tables
from accuracy.kept import Kept
from accuracy.score import score
from accuracy.scripts import PROBE, SETS, scripts
from accuracy.truth import LAUNCHES, Answer, Bench, Cell, cells_of

SEVERITIES = (5, 10, 20, 40)

QUICK = {
    "tuning/shapes_cnn": ("slow-collate", "checkpoint-stall"),
    "tuning/table_mlp": ("gc-pauses", "python-overhead"),
    "tuning/text_gpt": ("frequent-evaluation",),
    "tuning/healthy_accumulation": (),
    "tuning/audio_tags": ("network", "slow-collate", "books", "frequent-evaluation"),
    "tuning/pair_matching": ("worker-startup",),
    "tuning/healthy_list": (),
    "tuning/healthy_stream": (),
    "tuning/healthy_trainer": (),
}
"""The faults of each script that `--quick` asks about, at the size of their probe, and its control."""

QUICK_S = 200
"""No cell of `--quick` begins later, and none is repeated after half of it: a shared machine asks less."""


def is_quick(cell: Cell) -> bool:
    """Whether `--quick` asks this."""
    faults = QUICK.get(str(cell.script))
    if faults is None or cell.kind not in ("single", "control"):
        return False
    return all((fault.name or fault.label) in faults for fault in cell.faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=[*SETS], help="only the scripts of one set")
    parser.add_argument("--only", metavar="TEXT", help="only scripts whose name contains this")
    parser.add_argument("--classes", help="only these faults; 'healthy' for the controls")
    parser.add_argument("--severities", default=",".join(map(str, SEVERITIES)))
    parser.add_argument(
        "--repeat", type=int, default=1, help="more runs of a cell whose truth is not resolved"
    )
    parser.add_argument("--real", action="store_true", help="each job is a `diagnose run` of its own")
    parser.add_argument("--quick", action="store_true", help="a fixed part, in minutes")
    parser.add_argument("--floor", type=float, help="least part of the faults to be named first, 0 to 1")
    parser.add_argument("--peers", action="store_true", help="also ask TraceML and gpuprof")
    parser.add_argument("--answers", type=Path, help="keep answers in this file, and ask only for others")
    parser.add_argument("--report", action="store_true", help="ask nothing more: only what is kept")
    args = parser.parse_args()

    severities = (PROBE,) if args.quick else tuple(map(int, args.severities.split(",")))
    wanted = set(args.classes.split(",")) if args.classes else None
    kept = Kept(args.answers)
    bench = Bench(repeat=args.repeat, launches=1 if args.quick else LAUNCHES, real=args.real)
    answers: list[Answer] = []
    started = time.monotonic()
    for script in scripts(args.set):
        if args.only and args.only not in str(script):
            continue
        for cell in cells_of(script, severities):
            names = {fault.label for fault in cell.faults} or {"healthy"}
            if (wanted and not names & wanted) or (args.quick and not is_quick(cell)):
                continue
            begun = time.monotonic()
            if args.quick and begun - started > QUICK_S:
                print(f"left out, {QUICK_S} s are over: {cell}", file=sys.stderr)
                continue
            if args.quick and begun - started > QUICK_S / 2:
                bench.repeat = 0
            answer = kept.answer(cell)
            if answer is not None:
                answers.append(answer)
            if answer is not None or args.report:
                continue
            answer = bench.answer(cell)
            kept.keep(answer)
            answers.append(answer)
            print(f"{time.monotonic() - begun:5.1f} s", *tables.row(answer), sep=" | ", file=sys.stderr)
            if answer.failed:
                print(answer.failed, file=sys.stderr)
    more = []
    if args.peers:
        from accuracy.peers import ask_peers

        more = [ask_peers(kept, answers)]
    print(tables.page(answers, more), end="")
    if args.floor is not None:
        scored = score(answers)
        sys.exit((scored.top_1 or 0.0) < args.floor or scored.false_alarms > 0)


if __name__ == "__main__":
    main()
