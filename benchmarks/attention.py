"""What torch's fused attention saves on a CPU, beside attention that is written out.

    python benchmarks/attention.py [--rounds 40]

Both compute the same forward and backward pass in turn, and beside them the products alone, one of them
again, as the fused kernel computes the scores twice. *Saved* is what the fused kernel takes less, as a part
of what the other spends between its products: the rule `unfused-attention` expects 1 of it.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

TOKENS = (16, 32, 64, 128, 256)
HEAD_SIZES = (16, 64)
SAMPLES, HEADS = 16, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    print(
        f"`python benchmarks/attention.py --rounds {rounds}`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.machine()}, torch {torch.__version__}: medians of {rounds} rounds, {SAMPLES} samples,"
        f" {HEADS} heads.\n"
    )
    print("| threads | tokens | size of a head | written out, ms | fused, ms | saved |")
    print("| --: | --: | --: | --: | --: | --: |")
    for threads, tokens, size in product((1, os.cpu_count() or 1), TOKENS, HEAD_SIZES):
        torch.set_num_threads(threads)
        own, fused, products = measured(tokens, size, rounds)
        saved = (own - fused) / max(own - products, 1e-9)
        print(f"| {threads} | {tokens} | {size} | {own:.2f} | {fused:.2f} | {saved:+.2f} |", flush=True)


def measured(tokens: int, size: int, rounds: int) -> tuple[float, float, float]:
    """Returns the milliseconds of the pass written out, of the fused one, and of the products alone."""
    q, k, v = (torch.randn(SAMPLES, HEADS, tokens, size, requires_grad=True) for _ in range(3))
    gradient = torch.randn(SAMPLES, HEADS, tokens, size)

    def passes(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        attend(q, k, v).backward(gradient)
        q.grad = k.grad = v.grad = None

    ways = (
        lambda: passes(written_out),
        lambda: passes(F.scaled_dot_product_attention),
        lambda: products(q, k, v, gradient),
    )
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 5):
        for way, spent in zip(ways, times, strict=True):
            begun = time.perf_counter()
            way()
            spent.append(1000 * (time.perf_counter() - begun))
    own, fused, alone = (statistics.median(spent[5:]) for spent in times)
    return own, fused, alone


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as a script writes it."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, -1) @ v


@torch.no_grad()
def products(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> None:
    """The products of both passes, and the first once more."""
    scores = q @ k.transpose(-2, -1)
    scores @ v
    scores.transpose(-2, -1) @ gradient
    towards = gradient @ v.transpose(-2, -1)
    towards @ k
    towards.transpose(-2, -1) @ q
    q @ k.transpose(-2, -1)


if __name__ == "__main__":
    main()
