"""Distils a large recurrent forecaster of electricity meters into a small one, over two micro-batches per update,
with windows of varying (but like) length from a background worker."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from typing import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


class Meters(Dataset):
    """An item is a whole micro-batch, cut out of the readings by one fancy index."""

    def __init__(self, meters: int, hours: int, batch: int, items: int):
        rng = np.random.default_rng(77)
        t = np.arange(hours)
        day = 1 + 0.6 * np.sin(2 * np.pi * (t[None] / 24 + rng.random((meters, 1))))
        week = 1 + 0.2 * np.sin(2 * np.pi * (t[None] / 168 + rng.random((meters, 1))))
        self.readings = (day * week * rng.gamma(8, 1 / 8, (meters, hours))).astype(np.float32)
        self.batch, self.items = batch, items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, item: int) -> Tensor:
        rng = np.random.default_rng(item)
        length = 37
        meter = rng.integers(0, len(self.readings), (self.batch, 1))
        start = rng.integers(0, self.readings.shape[1] - length, (self.batch, 1))
        return torch.from_numpy(self.readings[meter, start + np.arange(length)])


class Forecaster(nn.Module):
    def __init__(self, width: int, layers: int):
        super().__init__()
        self.gru = nn.GRU(1, width, layers, batch_first=True)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, spread = self.head(self.gru(x[..., None])[0]).unbind(-1)
        return mean, nn.functional.softplus(spread) + 1e-3


@dataclass
class State:
    step: int = 0
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    lr: float = 0.0


class Callbacks:
    def __init__(self) -> None:
        self.after: list[tuple[int, Callable[[State], None]]] = []

    def every(self, n: int):
        def add(f):
            self.after.append((n, f))
            return f

        return add

    def __call__(self, state: State) -> None:
        for n, f in self.after:
            if state.step % n == 0:
                f(state)


def kl(p: tuple[Tensor, Tensor], q: tuple[Tensor, Tensor]) -> Tensor:
    return ((q[1] / p[1]).log() + (p[1] ** 2 + (p[0] - q[0]) ** 2) / (2 * q[1] ** 2) - 0.5).mean()


def nll(p: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return (p[1].log() + (y - p[0]) ** 2 / (2 * p[1] ** 2)).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(5)
    torch.set_num_threads(1)  # two CPUs: one for this, one for the worker

    micro = 2
    data = Meters(300, 24 * 200, 20, steps * micro)
    loader = DataLoader(data, batch_size=None, num_workers=1, prefetch_factor=8)
    held_out = torch.stack([data[10**6 + i] for i in range(2)]).flatten(0, 1)

    teacher = Forecaster(72, 2).eval().requires_grad_(False)
    student = Forecaster(48, 1)
    opt = torch.optim.AdamW(student.parameters(), lr=3e-3, fused=True)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda i: 0.5 * (1 + math.cos(math.pi * i / (steps + 1)))
    )

    callbacks = Callbacks()

    @callbacks.every(20)
    def tell(state: State) -> None:
        print(f"[{state.step:4d}] loss {state.loss.item():.4f} lr {state.lr:.1e}")

    @callbacks.every(50)
    def validate(state: State) -> None:
        student.eval()
        with torch.inference_mode():
            print(f"       held out {nll(student(held_out[:, :-1]), held_out[:, 1:]).item():.4f}")
        student.train()

    state, total = State(), torch.zeros(())
    for i, window in enumerate(loader, 1):  # the training loop
        x, y = window[:, :-1], window[:, 1:]
        with torch.no_grad():
            wise = teacher(x)
        mine = student(x)
        loss = 0.3 * kl(wise, mine) + 0.7 * nll(mine, y)
        (loss / micro).backward()
        total += loss.detach() / micro
        if i % micro:
            continue
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        sched.step()
        state.step += 1
        state.loss, state.lr = total.clone(), sched.get_last_lr()[0]
        total.zero_()
        callbacks(state)


if __name__ == "__main__":
    main()
