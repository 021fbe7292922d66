"""Predicts the power of each turbine of a wind farm: two processes, two halves of a batch in each."""

import argparse
from contextlib import nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TURBINES, HISTORY, PARTS = 24, 36, 2


def simulate(hours):
    """Wind that passes over the turbines one after the other, and the power that they make of it."""
    breeze = 8 + 3 * torch.sin(torch.arange(hours + TURBINES) / 15) + torch.randn(hours + TURBINES)
    wind = breeze.unfold(0, TURBINES, 1)[:hours] + 0.3 * torch.randn(hours, TURBINES)
    return wind / 8, (wind / 12).clamp(0, 1) ** 3


def cut(wind, power, rows):
    """Draws windows of history and the power in the hour after."""
    while True:
        order = torch.randperm(len(wind) - HISTORY)
        for starts in order[: len(order) // rows * rows].split(rows):
            yield wind[starts[:, None] + torch.arange(HISTORY)].transpose(1, 2), power[starts + HISTORY]


class Mix(nn.Module):
    """Lets each turbine look at the others, then at itself."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.across = nn.Linear(TURBINES, TURBINES)
        self.own = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.own(self.norms[1](x))


def build(width=128, depth=3):
    mixes = [Mix(width) for _ in range(depth)]
    return nn.Sequential(nn.Linear(HISTORY, width), *mixes, nn.Linear(width, 1), nn.Flatten())


def train(steps):
    rank = dist.get_rank()
    torch.manual_seed(50 + rank)
    feed = cut(*simulate(2000), rows=16)
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    for step in range(1, steps + 1):  # the training loop
        optimizer.zero_grad()
        for part, (history, power) in enumerate(islice(feed, PARTS), 1):
            with nullcontext() if part == PARTS else model.no_sync():
                loss = nn.functional.mse_loss(model(history), power) / PARTS
                loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step} error {PARTS * loss.item():.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    wanted = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(wanted)
    finally:
        dist.destroy_process_group()
