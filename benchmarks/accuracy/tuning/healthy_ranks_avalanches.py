"""Danger of avalanches by snow profiles and weather, on two processes that synchronize at each second batch.

The first process keeps the score of winters past, from time to time, and alone.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

LAYERS, WEATHER, LEVELS = 20, 10, 5


class Slope(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layer = nn.Linear(4, width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.weather = nn.Linear(WEATHER, width)
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, LEVELS))

    def forward(self, profile, weather):
        x = self.layer(profile)
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        return self.head(torch.cat([x.mean(1), self.weather(weather)], 1))


def winters(days, seed):
    snow = torch.Generator().manual_seed(seed)
    profile = torch.randn(days, LAYERS, 4, generator=snow)
    weather = torch.randn(days, WEATHER, generator=snow)
    danger = profile[:, :6, 0].mean(1) * 2 + weather[:, 0]
    return profile, weather, torch.bucketize(danger, torch.tensor([-1.5, -0.5, 0.5, 1.5]))


def train(args, rank):
    torch.manual_seed(6)
    slope = DistributedDataParallel(Slope(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(slope.parameters(), lr=2e-3, fused=True)
    data = winters(4096, seed=50 + rank)
    past = winters(64, seed=49)
    draw = torch.Generator().manual_seed(rank)
    for step in range(args.steps):  # the training loop
        for part in range(args.parts):
            rows = torch.randint(len(data[0]), (args.rows,), generator=draw)
            profile, weather, danger = (side[rows] for side in data)
            last = part == args.parts - 1
            with contextlib.nullcontext() if last else slope.no_sync():
                loss = nn.functional.cross_entropy(slope(profile, weather), danger)
                (loss / args.parts).backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 100 == 99:
            with torch.no_grad():
                right = (slope.module(*past[:2]).argmax(1) == past[2]).float().mean()
            print(
                f"step {step + 1}: loss {loss.item():.3f}, {right.item():.0%} of past days right",
                flush=True,
            )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--parts", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args, int(os.environ["RANK"]))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
