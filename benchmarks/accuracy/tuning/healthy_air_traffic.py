"""Minutes by which flights arrive late, on two ranks, each step from two parts of a batch."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

AIRPORTS, CARRIERS, WEATHER = 300, 40, 24
PARTS, ROWS = 2, 192


class DelayNet(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.airports, self.carriers = nn.Embedding(AIRPORTS, 32), nn.Embedding(CARRIERS, 16)
        self.body = nn.Sequential(
            nn.Linear(2 * 32 + 16 + WEATHER, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, 1),
        )

    def forward(self, places, carriers, weather):
        known = torch.cat([self.airports(places).flatten(1), self.carriers(carriers), weather], dim=1)
        return self.body(known).squeeze(1)


def make_flights(amount, seed):
    draw = torch.Generator().manual_seed(seed)
    places = torch.randint(0, AIRPORTS, (amount, 2), generator=draw)
    carriers = torch.randint(0, CARRIERS, (amount,), generator=draw)
    weather = torch.randn(amount, WEATHER, generator=draw)
    late = weather[:, 0].relu() * 2 + (places[:, 0] % 7) / 7 + weather[:, 1] * weather[:, 2]
    return places, carriers, weather, late


def parts_of(flights):
    amount = len(flights[0])
    while True:
        for rows in torch.randperm(amount).split(ROWS):
            yield [column[rows] for column in flights]


def train(steps):
    rank = dist.get_rank()
    parts = parts_of(make_flights(ROWS * 100, seed=50 + rank))
    net = DistributedDataParallel(DelayNet())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(steps, 1))
    for step in range(1, steps + 1):  # the training loop
        optimizer.zero_grad()
        for part in range(PARTS):
            *inputs, late = next(parts)
            with nullcontext() if part == PARTS - 1 else net.no_sync():
                loss = F.huber_loss(net(*inputs), late) / PARTS
                loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 0 and rank == 0:
            print(f"{step} {PARTS * loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(50)
    dist.init_process_group("gloo")
    try:
        train(args.steps)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
