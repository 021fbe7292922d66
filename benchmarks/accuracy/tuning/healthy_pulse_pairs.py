"""Self-supervised heart beats: two views of each beat, a Barlow-twins loss, gradients of two halves accumulated."""  # noqa: E501

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn


def beats(count: int, length: int = 192) -> Tensor:
    t = torch.linspace(0, 1, length)
    where = 0.5 + 0.03 * torch.randn(count, 1)
    peak = torch.exp(-(((t - where) / 0.02) ** 2)) - 0.3 * torch.exp(-(((t - where - 0.05) / 0.03) ** 2))
    return peak + 0.2 * torch.exp(-(((t - 0.75) / 0.06) ** 2)) + 0.03 * torch.randn(count, length)


def view(x: Tensor) -> Tensor:
    """Another gain for each beat, a common shift, and noise."""
    shift = int(torch.randint(-8, 9, ()))
    return x.roll(shift, 1) * torch.empty(len(x), 1).uniform_(0.8, 1.2) + torch.randn_like(x) * 0.02


def twins(a: Tensor, b: Tensor) -> Tensor:
    a = (a - a.mean(0)) / (a.std(0) + 1e-4)
    b = (b - b.mean(0)) / (b.std(0) + 1e-4)
    cross = a.T @ b / len(a)
    on = (cross.diagonal() - 1).square().sum()
    return on + 0.01 * (cross.square().sum() - cross.diagonal().square().sum())


class Callbacks:
    def __init__(self, *calls: tuple[int, Callable[[int, Tensor], None]]) -> None:
        self.calls = calls

    def __call__(self, step: int, loss: Tensor) -> None:
        for every, call in self.calls:
            if step % every == 0:
                call(step, loss)


def encoder(width: int = 256) -> nn.Module:
    return nn.Sequential(
        nn.Linear(192, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, 128),
    )


def main(steps: int) -> None:
    torch.manual_seed(6)
    data = beats(8192)
    net = encoder()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.02, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda n: min(1.0, (n + 1) / 20) * 0.5 * (1 + math.cos(math.pi * n / (steps + 1)))
    )
    after = Callbacks(
        (50, lambda step, loss: print(f"{step:5d}  {loss.item():8.3f}", flush=True)),
        (100, lambda step, loss: print("       lr", sched.get_last_lr()[0])),
    )
    half = 256
    order = torch.randperm(len(data))

    for step in range(steps):  # the training loop
        total = torch.zeros(())
        for part in range(2):
            start = (2 * step + part) * half % len(data)
            x = data[order[start : start + half]]
            loss = twins(net(view(x)), net(view(x))) / 2
            loss.backward()
            total += loss.detach()
        opt.step()
        opt.zero_grad(set_to_none=True)
        sched.step()
        after(step, total)


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    main(cli.parse_args().steps)
