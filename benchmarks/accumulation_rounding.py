"""How far apart are two trainings that only average gradients at other moments? Prints a table.

    python benchmarks/accumulation_rounding.py [--steps 2400]

`benchmarks/tuning/accumulation.py` is trained here in one process, with the batches of both ranks: averages
after each pass, as DDP makes them, and once a step, as under `no_sync`. For comparison one weight is moved
by one unit in its last place before training, and nothing else is changed. With float64 the two ways differ
by what they round there: the arithmetic is the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection

import torch
from torch import nn

NUM_ROWS, BATCH, PASSES, RATE = 4096, 8, 4, 0.01
TOLD_AT = (5, 100, 600, 1200, 2400)
FLOAT64_STEPS = 600


def train(
    steps: int,
    told_at: Collection[int],
    *,
    once: bool,
    dtype: torch.dtype = torch.float32,
    nudge: float = 0,
) -> dict[int, float]:
    """Returns the first rank's loss of some steps' last passes."""
    torch.manual_seed(0)
    rows_NF = torch.randn(NUM_ROWS, 64).to(dtype)
    model = nn.Sequential(
        nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)
    ).to(dtype)
    params = list(model.parameters())
    with torch.no_grad():
        params[0][0, 0] *= 1 + nudge
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(0))
    of_ranks = [order[rank::2].split(BATCH) for rank in (0, 1)]
    losses: dict[int, float] = {}
    gradients: list[list[torch.Tensor]] = []
    for number in range(steps * PASSES):
        last = 0.0
        if number % PASSES == 0:
            gradients = [[torch.zeros_like(p) for p in params] for _ in of_ranks]
        for own, batches in zip(reversed(gradients), reversed(of_ranks), strict=True):
            batch_BF = rows_NF[batches[number % len(batches)]]
            loss = (model(batch_BF).squeeze(1) - batch_BF.sum(dim=1)).square().mean() / PASSES
            for sum_of_passes, new in zip(own, torch.autograd.grad(loss, params), strict=True):
                sum_of_passes += new
            last = loss.item()
        is_last = number % PASSES == PASSES - 1
        if is_last or not once:
            for first, second in zip(*gradients, strict=True):
                second.copy_(first.div_(2).add_(second.div_(2)))
        if is_last:
            with torch.no_grad():
                for p, gradient in zip(params, gradients[0], strict=True):
                    p -= RATE * gradient
            step = number // PASSES + 1
            if step in told_at:
                losses[step] = last
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=TOLD_AT[-1])
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    told_at = [step for step in TOLD_AT if step <= steps]
    plain = train(steps, told_at, once=False)
    late = train(steps, told_at, once=True)
    moved = train(steps, told_at, once=False, nudge=torch.finfo(torch.float32).eps)
    precise_steps = min(steps, FLOAT64_STEPS)
    precise, precise_late = (
        train(precise_steps, told_at, once=once, dtype=torch.float64) for once in (False, True)
    )
    print("| step | loss | averaged once a step | one weight moved by 1.2e-7 | once a step, in float64 |")
    print("|---|---|---|---|---|")
    for step in told_at:
        apart = [abs(other[step] / plain[step] - 1) for other in (late, moved)]
        in_float64 = f"{abs(precise_late[step] / precise[step] - 1):.1e}" if step in precise else "-"
        print(f"| {step} | {plain[step]:.2e} | {apart[0]:.1e} | {apart[1]:.1e} | {in_float64} |")


if __name__ == "__main__":
    main()
