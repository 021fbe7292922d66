"""What does one call for all tensors save of an optimizer's step, with large tensors on a CPU?

    python benchmarks/optimizer_step.py [--threads 1]

Prints the least median of three turns, one by one and fused, with freed memory kept: what the rule
`slow-optimizer` counts on, and likewise what each group of parameters adds, and what calls for all tensors
save of an optimizer that a script has written. Then what clipping all gradients in one call takes, which
the rule `slow-clipping` subtracts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from diagnose.actions.keep_freed_memory import STATEMENT

KINDS = {"AdamW": {}, "Adagrad": {}, "SGD": {"momentum": 0.9}}
WIDTHS = (64, 256, 768, 2048)
NUM_LAYERS = 3
STEPS = 60

SIDES = (16, 40, 70, 128, 256)
CLIPPED_SIDES = (8, 40, 128, 256, 512)
NUM_GROUPS = 200
IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False, "fused": False},
}
VELOCITIES, NUM_OWN, OWN_STEPS = 8, 74, 12
"""Of aggregated momentum (AggMo): each tensor has several velocities, each with a decay of its own."""


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

    print("\n| optimizer | implementation | in one group, us per tensor | each in its own, us |")
    print("|---|---|---|---|")
    for kind, options in KINDS.items():
        for name, implementation in IMPLEMENTATIONS.items():
            one_us, each_us = group_us(kind, {**options, **implementation})
            print(f"| {kind} | {name} | {one_us:.1f} | {each_us:.1f} |")

    print("\n| own optimizer, elements per tensor | in a loop, ms | foreach, ms | saved |")
    print("|---|---|---|---|")
    for side in SIDES:
        loop_ms, each_ms = own_ms(side)
        print(f"| {side * side:,} | {loop_ms:.2f} | {each_ms:.2f} | {1 - each_ms / loop_ms:.0%} |")

    print("\n| clipping, elements per tensor | in a loop, us per tensor | in one call, us per tensor |")
    print("|---|---|---|")
    for side in CLIPPED_SIDES:
        loop_us, each_us = clip_us(side)
        print(f"| {side * side:,} | {loop_us:.1f} | {each_us:.1f} |")


def group_us(kind: str, options: dict[str, float]) -> tuple[float, float]:
    """Returns microseconds per tensor of a step over tiny ones, the least median of three turns: with all
    of them in one group, and with each in one of its own."""
    parameters = [nn.Parameter(torch.randn(4)) for _ in range(NUM_GROUPS)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    groups = [{"params": [parameter]} for parameter in parameters]
    make = getattr(torch.optim, kind)
    turns = [
        [median_ms(make(given, lr=1e-4, **options).step, OWN_STEPS) for given in (parameters, groups)]
        for _ in range(3)
    ]
    one_ms, each_ms = (min(column) for column in zip(*turns, strict=True))
    return 1000 * one_ms / NUM_GROUPS, 1000 * each_ms / NUM_GROUPS


def own_ms(side: int) -> tuple[float, float]:
    """Returns the least median of three turns of a step over square tensors: by a loop, and `foreach`."""
    weights, grads = ([torch.randn(side, side) for _ in range(NUM_OWN)] for _ in range(2))
    velocities = [[torch.zeros_like(weight) for weight in weights] for _ in range(VELOCITIES)]
    decays = [0.95 * number / VELOCITIES for number in range(VELOCITIES)]

    def loop() -> None:
        for number, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            for decay, kept in zip(decays, velocities, strict=True):
                kept[number].mul_(decay).add_(grad)
                weight.sub_(kept[number], alpha=1e-6)

    def each() -> None:
        for decay, kept in zip(decays, velocities, strict=True):
            torch._foreach_mul_(kept, decay)
            torch._foreach_add_(kept, grads)
            torch._foreach_sub_(weights, kept, alpha=1e-6)

    turns = [[median_ms(step, OWN_STEPS) for step in (loop, each)] for _ in range(3)]
    loop_ms, each_ms = (min(column) for column in zip(*turns, strict=True))
    return loop_ms, each_ms


def clip_us(side: int) -> tuple[float, float]:
    """Returns microseconds per tensor, the least median of three turns of clipping square gradients: by
    a loop that reads each norm, and by `clip_grad_norm_` with `foreach`."""
    parameters = [nn.Parameter(torch.randn(side, side)) for _ in range(NUM_OWN)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def loop() -> None:
        total = sum(parameter.grad.norm().item() ** 2 for parameter in parameters)
        for parameter in parameters:
            parameter.grad.mul_(min(1.0, 1e6 / (total**0.5 + 1e-6)))

    def each() -> None:
        nn.utils.clip_grad_norm_(parameters, 1e6, foreach=True)

    turns = [[median_ms(step, STEPS) for step in (loop, each)] for _ in range(3)]
    loop_ms, each_ms = (min(column) for column in zip(*turns, strict=True))
    return 1000 * loop_ms / NUM_OWN, 1000 * each_ms / NUM_OWN


def step_ms(kind: str, parameters: list[nn.Parameter], fused: bool, options: dict[str, float]) -> float:
    """Returns the median step."""
    optimizer = getattr(torch.optim, kind)(parameters, lr=1e-4, fused=fused, **options)
    return median_ms(optimizer.step, STEPS)


def median_ms(step: Callable[[], object], count: int) -> float:
    """Returns the median of so many calls, without the first ones."""
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return 1000 * statistics.median(times[count // 6 :])


if __name__ == "__main__":
    main()
