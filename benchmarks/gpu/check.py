"""Runs the kernels that `optimizers.py` times on small tensors of odd sizes; compares with float64.

    compute-sanitizer --tool memcheck python benchmarks/gpu/check.py

This is what compute-sanitizer watches: it makes a GPU slower by a hundred times.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from optimizer_case import error_of  # noqa: E402 - after the line that lets it find `diagnose`
from optimizer_clock import clock_for  # noqa: E402
from optimizer_rows import ROWS  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", help="only these rows, such as A B0")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="of the order in which an emulated device runs")
    args = parser.parse_args()
    checked = wrong = 0
    with clock_for(dry_run=args.dry_run, seed=args.seed) as clock:
        for row in ROWS:
            for contender in row.contenders if not args.rows or row.letter in args.rows else ():
                if contender.ours:
                    error = error_of(row, contender, clock)
                    ok = error <= row.worst_error
                    wrong += not ok
                    checked += 1
                    print(f"{row.letter} {contender.name}: off by {error:.2g}, {'ok' if ok else 'WRONG'}")
    print(f"{checked - wrong} of {checked} agree with float64")
    return int(wrong > 0 or not checked)


if __name__ == "__main__":
    sys.exit(main())
