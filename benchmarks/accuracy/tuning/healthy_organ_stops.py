"""A diffusion model of the spectra of organ pipes, conditioned on their stop; keeps averaged weights."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@dataclasses.dataclass
class Plan:
    steps: int
    batch: int = 256
    partials: int = 128
    stops: int = 12
    width: int = 512
    lr: float = 4e-4
    average: float = 0.995
    seed: int = 1685


def pipes(plan: Plan, count: int = 20_000):
    rng = np.random.default_rng(plan.seed)
    stop = rng.integers(0, plan.stops, count)
    number = np.arange(1, plan.partials + 1)
    fall = 0.3 + 0.1 * stop[:, None] + 0.05 * rng.standard_normal((count, 1))
    level = -fall * np.log(number) + 0.2 * rng.standard_normal((count, plan.partials))
    level[stop % 3 == 0, 1::2] -= 1.5  # stopped pipes have few even partials
    level = (level - level.mean()) / level.std()
    return torch.from_numpy(level.astype(np.float32)), torch.from_numpy(stop)


class Residual(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + F.silu(self.linear(self.norm(x)))


class Denoiser(nn.Module):
    def __init__(self, plan: Plan):
        super().__init__()
        self.stop = nn.Embedding(plan.stops, 32)
        self.register_buffer("tempo", torch.exp(torch.linspace(0, math.log(500), 16)))
        self.enter = nn.Linear(plan.partials + 64, plan.width)
        self.middle = nn.Sequential(*(Residual(plan.width) for _ in range(3)))
        self.leave = nn.Linear(plan.width, plan.partials)

    def forward(self, noisy, when, stop):
        angle = when * self.tempo
        x = torch.cat([noisy, angle.sin(), angle.cos(), self.stop(stop)], 1)
        return self.leave(self.middle(self.enter(x)))


def main(plan: Plan):
    torch.manual_seed(plan.seed)
    level, stop = pipes(plan)
    model = Denoiser(plan)
    averaged = copy.deepcopy(model).requires_grad_(False)
    fresh, slow = [p.detach() for p in model.parameters()], list(averaged.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, fused=True)
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 50))
    for step in range(plan.steps):  # the training loop
        rows = torch.randint(len(level), (plan.batch,))
        clean, noise, when = level[rows], torch.randn(plan.batch, plan.partials), torch.rand(plan.batch, 1)
        turn = when * (math.pi / 2)
        guess = model(turn.cos() * clean + turn.sin() * noise, when, stop[rows])
        loss = F.mse_loss(guess, noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warm.step()
        torch._foreach_lerp_(slow, fresh, 1 - plan.average)
        if step % 50 == 49:
            print(f"{step + 1}: {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=256)
    chosen = parser.parse_args()
    main(Plan(steps=chosen.steps, batch=chosen.batch))
