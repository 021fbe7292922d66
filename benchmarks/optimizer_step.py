"""What does one call for all tensors save of an optimizer's step, with large tensors on a CPU?

    python benchmarks/optimizer_step.py [--threads 1]

Prints the least median of three turns, one by one and fused, with freed memory kept: what the rule
`slow-optimizer` counts on.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import nn

from diagnose.actions.keep_freed_memory import STATEMENT

KINDS = {"AdamW": {}, "Adagrad": {}, "SGD": {"momentum": 0.9}}
WIDTHS = (64, 256, 768, 2048)
NUM_LAYERS = 3
STEPS = 60


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    exec(STATEMENT)
    print("| optimizer | elements per tensor | one by one, ms | fused, ms | saved |")
    print("|---|---|---|---|---|")
    for width in WIDTHS:
        shapes = [(width, width), (width,)] * NUM_LAYERS
        parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        mean = sum(parameter.numel() for parameter in parameters) / len(parameters)
        for kind, options in KINDS.items():
            turns = [
                [step_ms(kind, parameters, fused, options) for fused in (False, True)] for _ in range(3)
            ]
            loop_ms, fused_ms = (min(column) for column in zip(*turns, strict=True))
            print(
                f"| {kind} | {mean:,.0f} | {loop_ms:.3f} | {fused_ms:.3f} | {1 - fused_ms / loop_ms:.0%} |"
            )


def step_ms(kind: str, parameters: list[nn.Parameter], fused: bool, options: dict[str, float]) -> float:
    """Returns the median step."""
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-4, fused=fused, **options)
    times = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        optimizer.step()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times[STEPS // 6 :])


if __name__ == "__main__":
    main()
