"""What torch's fused attention saves on a CPU, beside attention that is written out.

    python benchmarks/attention.py [--rounds 12]

Both compute the same forward and backward pass in turn, from one tensor of queries, keys and values as a
layer makes it, with a mask of padding and without. Beside them stands what the operations between the
tensors take, timed node by node as a run of `diagnose` does. *Factor* is what the fused kernel takes of the
products, one of them again: the rule `unfused-attention` expects `FUSED` of it. Run it with
`MALLOC_TRIM_THRESHOLD_` and `MALLOC_MMAP_THRESHOLD_` at 4294967296, so that memory which was freed is
kept: page faults are another rule's.
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
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from diagnose.hooks._graph import walk
from diagnose.hooks._graph_facts import summarize
from diagnose.hooks._node_clock import NodeClock

TOKENS = (32, 64, 96, 128, 160, 192, 256)
HEAD_SIZES = (16, 32, 64)
SCORES, HEADS = 1 << 20, 4
"""Scores of a pass, whatever the tokens: the samples are as many as make so many."""

CLOCKED = 6
"""Passes that are timed node by node; the quickest counts."""

Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    print(
        f"`python benchmarks/attention.py --rounds {rounds}`, {date.today()}, {os.cpu_count()} cores,"
        f" {platform.machine()}, torch {torch.__version__}: medians of {rounds} rounds, {SCORES} scores,"
        f" {HEADS} heads.\n"
    )
    print("| threads | tokens | size of a head | mask | written out, ms | fused, ms | factor |")
    print("| --: | --: | --: | --- | --: | --: | --: |")
    for threads, tokens, size, masked in product(
        (1, os.cpu_count() or 1), TOKENS, HEAD_SIZES, (False, True)
    ):
        torch.set_num_threads(threads)
        own_ms, fused_ms, factor = measured(tokens, size, masked, rounds)
        mask = "yes" if masked else "no"
        print(
            f"| {threads} | {tokens} | {size} | {mask} | {own_ms:.2f} | {fused_ms:.2f} | {factor:.2f} |",
            flush=True,
        )


def measured(tokens: int, size: int, masked: bool, rounds: int) -> tuple[float, float, float]:
    """Returns the milliseconds of the pass written out and of the fused one, and what the fused kernel
    takes as a multiple of the products, one of them again."""
    samples = max(1, round(SCORES / (HEADS * tokens**2)))
    x_BTD = torch.randn(samples, tokens, 3 * HEADS * size, requires_grad=True)
    gradient_BTD = torch.randn(samples, tokens, HEADS * size)
    real = torch.rand(samples, 1, 1, tokens) > 0.1 if masked else None

    def forward(attend: Attend) -> Tensor:
        q, k, v = x_BTD.view(samples, tokens, 3, HEADS, size).permute(2, 0, 3, 1, 4)
        return attend(q, k, v, real).transpose(1, 2).reshape(samples, tokens, HEADS * size)

    ways: tuple[Attend, ...] = (written_out, F.scaled_dot_product_attention)
    times: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 3):
        for way, spent in zip(ways, times, strict=True):
            begun = time.perf_counter()
            forward(way).backward(gradient_BTD)
            spent.append(1000 * (time.perf_counter() - begun))
            x_BTD.grad = None
    own_ms, fused_ms = (statistics.median(spent[3:]) for spent in times)
    facts = clocked(lambda: (forward(written_out) * gradient_BTD).sum())
    whole, products = facts["attention"], facts["attention_products"]
    whole_ns = whole["backward_ns"] + whole["forward_ns"]
    ideal_ns = products["backward_ns"] + 1.5 * products["forward_ns"]
    return own_ms, fused_ms, (whole_ns - 1e6 * (own_ms - fused_ms)) / ideal_ns


def clocked(forward: Callable[[], Tensor]) -> dict[str, Any]:
    """Returns the facts of a graph whose nodes were timed."""
    clock = NodeClock(time.perf_counter_ns)
    kept, truncated = walk(forward().grad_fn)
    for _ in range(CLOCKED):
        loss, passed = forward(), []
        walk(loss.grad_fn, passed=passed)
        clock.watch(passed)
        loss.backward()
        for index, took_ns in clock.times_ns().items():
            kept[index].backward_ns = min(took_ns, kept[index].backward_ns or took_ns)
    clock.forget()
    return summarize(kept, truncated, ())


def written_out(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
    """Attention as a script writes it."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if real is not None:
        scores = scores.masked_fill(~real, float("-inf"))
    return torch.softmax(scores, -1) @ v


if __name__ == "__main__":
    main()
