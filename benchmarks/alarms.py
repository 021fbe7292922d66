"""Is what is said of a job without a fault true? Mends it, and measures what that wins.

A script of `accuracy/` is healthy when its author thinks so. Where `diagnose` finds something all the same,
the file beside the script can hold what would mend that, and the two are compared here:

    [[mend]]
    rule = "worker-transfer"         what is said
    old = "num_workers=1"            the text of the script that is replaced
    new = "num_workers=0"

Runs with and without take turns, each in a process of its own; the time is the accuracy benchmark's clock
at the optimizer. Prints markdown:

    python benchmarks/alarms.py --only meter_distill
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from accuracy.scripts import Mend, Script, scripts
from accuracy.server import CLOCKED, real_run

from diagnose.gate.in_turns import KEEPS_FREED

PAIRS = 5
"""Runs of each."""

LONGER = 3
"""They take so many times the steps that a script takes by itself."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", metavar="TEXT", default="", help="only scripts whose name contains this")
    args = parser.parse_args()
    os.environ.update({name: os.environ.get(name, value) for name, value in KEEPS_FREED.items()})
    print("| job | said | of the step | truly, median of 5 pairs | from | to |")
    print("| --- | --- | --: | --: | --: | --: |")
    for script in scripts():
        for mend in script.mends if args.only in str(script) else ():
            print(f"| {' | '.join(row(script, mend))} |", flush=True)


def row(script: Script, mend: Mend) -> tuple[str, ...]:
    """Returns a row of the table: what is said of a script, and what the mended one wins."""
    said = [
        sum(
            f.lost_share
            for f in real_run(script.path, (), ranks=script.ranks).findings
            if f.rule == mend.rule
        )
        for _ in range(3)
    ]
    with tempfile.TemporaryDirectory(prefix="alarms-") as folder:
        mended = Path(folder, script.path.name)
        mended.write_text(mend.of(script.path.read_text(encoding="utf-8")), encoding="utf-8")
        longer = ("--steps", str(LONGER * script.steps)) if script.steps else ()
        both, ranks = (script.path, mended), script.ranks
        pairs = [[step_ms(path, *longer, ranks=ranks) for path in both] for _ in range(PAIRS)]
    won = [(before - after) / before for before, after in pairs]
    shares = (statistics.median(said), statistics.median(won), min(won), max(won))
    return script.path.stem, f"`{mend.rule}`", *(f"{share:.0%}" for share in shares)


def step_ms(path: Path, *arguments: str, ranks: int) -> float:
    """Runs a script; returns the mean time of its steps."""
    several = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory(prefix="alarms-") as folder:
        times = Path(folder, "times")
        subprocess.run(
            [sys.executable, *several, str(CLOCKED), str(times), str(path), *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return float(times.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
