"""What does it cost that memory goes back to the system in each step, and what does keeping it win?

    OMP_NUM_THREADS=1 python benchmarks/page_faults.py [--processes 5] [--rounds 3]

Trains a small network with Adam in one process after the other, with what is freed kept and not kept in
turn, and prints for each turn the step, its page faults, its time in the kernel, and what was won as a part
of that time: the constants of the rule `page-faults`. Where glibc's limits lie is decided by what was freed
first, so that the step that a script gets by itself is another in each process, too.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import nn

from diagnose.actions.keep_freed_memory import KeepFreedMemory
from diagnose.core.job import Job

STEPS = 150
SETTLE = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", action="store_true", help="one process, as JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measured(args.rounds)))
        return
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; median step of {STEPS}")
    print(
        "| process | step, ms | page faults | in the kernel, ms | kept, ms | faster | won / in the kernel |"
    )
    print("|---|---|---|---|---|---|---|")
    gains, parts = [], []
    for process in range(1, args.processes + 1):
        command = [sys.executable, __file__, "--one", "--rounds", str(args.rounds)]
        rows = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for off_ms, faults, kernel_ms, on_ms in rows:
            gains.append(off_ms / on_ms)
            parts.append((off_ms - on_ms) / kernel_ms if kernel_ms else 0.0)
            print(
                f"| {process} | {off_ms:.2f} | {faults:.0f} | {kernel_ms:.2f} | {on_ms:.2f} "
                f"| {gains[-1]:.2f}x | {parts[-1]:.2f} |"
            )
    print(f"\nfaster: median {statistics.median(gains):.2f}x ({min(gains):.2f} to {max(gains):.2f})")
    print(
        f"won / in the kernel: median {statistics.median(parts):.2f} ({min(parts):.2f} to {max(parts):.2f})"
    )


def measured(rounds: int) -> list[tuple[float, float, float, float]]:
    """Returns for each round: the step without, its page faults, its time in the kernel, the step with."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    x, y = torch.randn(32, 256), torch.randint(0, 2, (32,))

    def steps(count: int) -> tuple[float, float, float]:
        times, before = [], resource.getrusage(resource.RUSAGE_SELF)
        for _ in range(count):
            begun = time.perf_counter()
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            times.append(time.perf_counter() - begun)
        after = resource.getrusage(resource.RUSAGE_SELF)
        faults, kernel_s = after.ru_minflt - before.ru_minflt, after.ru_stime - before.ru_stime
        return 1000 * statistics.median(times), faults / count, 1000 * kernel_s / count

    job, action, rows = Job(models=[model], optimizers=[optimizer]), KeepFreedMemory(), []
    steps(4 * SETTLE)
    with action.prepare(job, None) as ready:
        for _ in range(rounds):
            without = steps(STEPS)
            with action.apply(job, ready):
                steps(SETTLE)
                kept_ms, _, _ = steps(STEPS)
            steps(SETTLE)
            rows.append((*without, kept_ms))
    return rows


if __name__ == "__main__":
    main()
