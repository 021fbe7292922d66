"""What does DDP take in a backward pass to put the gradients into its buckets?

    OMP_NUM_THREADS=1 python benchmarks/ddp_buckets.py [--rounds 30]

One process, which is all the ranks of its job, runs the same backward pass in turn as it is and under
`no_sync`, with gradients that are there already, as in every micro-batch but the first. Both are timed
until the last gradient is there: the rest of the reduction comes then, a rank waits for it, and that is
measured in each run. Prints what the averaged pass takes longer, and two numbers that fit all rows best:
the constants of the rule `missing-no-sync`.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from contextlib import nullcontext
from datetime import date
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

TENSORS = (20, 200)
MEGABYTES = (1, 10, 100)
SETTLE = 5


class Products(nn.Module):
    """A loss whose backward pass hardly takes longer than writing the gradients.

    Args:
        num_tensors: Parameters.
        num_elements: Of each of them.
    """

    def __init__(self, num_tensors: int, num_elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(num_elements) for _ in range(num_tensors))
        self.features = torch.randn(num_elements)

    def forward(self) -> Tensor:
        """Returns the loss."""
        return torch.stack([torch.dot(weight, self.features) for weight in self.weights]).sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print(
        f"`python benchmarks/ddp_buckets.py --rounds {rounds}`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads: medians of"
        f" {rounds} rounds.\n"
    )
    print("| tensors | MB | under no_sync, ms | averaged, ms | longer, ms |")
    print("| --: | --: | --: | --: | --: |")
    rows, longer = [], []
    for num_tensors, megabytes in product(TENSORS, MEGABYTES):
        without_ms, with_ms = measured(num_tensors, megabytes * 10**6, rounds)
        more_ms = with_ms - without_ms
        rows.append([float(num_tensors), megabytes * 1e6])
        longer.append(1e6 * more_ms)
        print(
            f"| {num_tensors} | {megabytes} | {without_ms:.2f} | {with_ms:.2f} | {more_ms:+.2f} |",
            flush=True,
        )
    # Each row counts alike, however large: its error as a part of itself.
    parts = torch.tensor(rows, dtype=torch.float64) / torch.tensor(longer, dtype=torch.float64)[:, None]
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    tensor_ns, byte_ns = torch.linalg.lstsq(parts, ones).solution[:, 0].tolist()
    print(f"\n{tensor_ns:.0f} ns per tensor, {1 / byte_ns:.1f} bytes of gradients in a nanosecond")
    dist.destroy_process_group()


def measured(num_tensors: int, num_bytes: int, rounds: int) -> tuple[float, float]:
    """Returns the milliseconds of a backward pass until its last gradient is there: under `no_sync`, and
    with its gradients averaged."""
    model = DistributedDataParallel(Products(num_tensors, num_bytes // (4 * num_tensors)))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + SETTLE):
        for averaged, spent in zip((False, True), times, strict=True):
            spent.append(one_pass(model, averaged))
    without_ms, with_ms = (statistics.median(spent[SETTLE:]) for spent in times)
    return without_ms, with_ms


def one_pass(model: DistributedDataParallel, averaged: bool) -> float:
    """Returns the milliseconds of one backward pass until its last gradient is there."""
    arrived: list[float] = []

    def begun(grads: Any) -> None:
        # Asked for before DDP asks for its own, in which it waits: so it is called before that.
        Variable._execution_engine.queue_callback(lambda: arrived.append(time.perf_counter()))

    with nullcontext() if averaged else model.no_sync():
        loss = model()
        handle = loss.grad_fn.register_prehook(begun)
        begun_s = time.perf_counter()
        loss.backward()
    handle.remove()
    return 1000 * (arrived[0] - begun_s)


if __name__ == "__main__":
    main()
