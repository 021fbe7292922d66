"""Fits how many bikes go from one station to another in an hour of the week, on two ranks."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STATIONS, WEEK, ROWS, PARTS = 300, 168, 192, 2


class FlowNet(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.stations = nn.Embedding(STATIONS, 64)
        self.hours = nn.Embedding(WEEK, 32)
        self.body = nn.Sequential(
            nn.Linear(160, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )

    def forward(self, pairs, hours):
        ends = self.stations(pairs).flatten(1)
        return self.body(torch.cat([ends, self.hours(hours)], dim=1)).squeeze(1)


def trips_of(rank, amount):
    generator = torch.Generator().manual_seed(900 + rank)
    pairs = torch.randint(STATIONS, (amount, 2), generator=generator)
    hours = torch.randint(WEEK, (amount,), generator=generator)
    rate = 1.5 + (pairs[:, 0] / 20).sin() * (pairs[:, 1] / 30).cos() + 0.4 * (hours / 4).sin()
    return pairs, hours, torch.poisson(rate.clamp(min=0.05), generator=generator)


def shuffled(amount, seed):
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(amount, generator=generator).split(ROWS)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(6)
    model = DistributedDataParallel(FlowNet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    pairs, hours, counts = trips_of(rank, ROWS * 100)
    order = shuffled(len(counts), rank)
    for step in range(args.steps):  # the training loop
        optimizer.zero_grad()
        for part in range(PARTS):
            rows = next(order)
            with nullcontext() if part == PARTS - 1 else model.no_sync():
                loss = nn.functional.poisson_nll_loss(model(pairs[rows], hours[rows]), counts[rows])
                (loss / PARTS).backward()
        optimizer.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
