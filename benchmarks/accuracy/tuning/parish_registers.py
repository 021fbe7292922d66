"""Occupations in old parish registers, read from misspelt entries (bags of n-grams); torchrun, two ranks."""

import argparse
import math
import os

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

OCCUPATIONS, GRAMS, MARGINALIA = 40, 24, 64


def transcribe(entries, rows, rank):
    rng = np.random.default_rng(40 + rank)
    grams = (rows * rng.random((entries, GRAMS)) ** 3).astype(np.int64)  # few are common, most are rare
    margin = rng.standard_normal((entries, MARGINALIA))
    trade = (grams[:, 0] * 7 + grams[:, 1] + (margin[:, 0] > 0)) % OCCUPATIONS
    return torch.from_numpy(grams), torch.from_numpy(margin.astype(np.float32)), torch.from_numpy(trade)


class Reader(nn.Module):
    def __init__(self, rows, width=384):
        super().__init__()
        self.grams = nn.EmbeddingBag(rows, 64, mode="mean")
        self.body = nn.Sequential(
            nn.Linear(64 + MARGINALIA, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, OCCUPATIONS),
        )

    def forward(self, grams, margin):
        return self.body(torch.cat([self.grams(grams), margin], 1))


class Evenhanded:
    """Lends weight to the households whose entries are read badly (multiplicative weights)."""

    def __init__(self, households, rate=0.02, floor=0.001):
        self.share = dict.fromkeys(range(households), 1 / households)
        self.rate, self.floor = rate, floor

    def __call__(self, houses, misses):
        gain = dict.fromkeys(self.share, 0.0)
        for house, miss in zip(houses, misses):
            gain[house] += miss
        total = 0.0
        for house, much in gain.items():
            grown = min(self.share[house] * math.exp(self.rate * much), 0.1)
            self.share[house] = grown
            total += grown
        even = 1 / len(self.share)
        for house, share in self.share.items():
            self.share[house] = (1 - self.floor) * share / total + self.floor * even
        return [self.share[house] / even for house in houses]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument(
        "--rare-rows",
        type=int,
        default=0,
        help="rows for rare n-grams, in thousands, above the common 1500",
    )
    parser.add_argument("--households", type=int, default=0, help="be just to so many households")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(17)
    rows = 1500 + 1000 * args.rare_rows
    grams, margin, trade = transcribe(60_000, rows, rank)
    reader = DDP(Reader(rows), gradient_as_bucket_view=True)
    sgd = torch.optim.SGD(reader.parameters(), lr=0.2, fused=True)
    justice = Evenhanded(args.households) if args.households else None
    shuffled = torch.Generator().manual_seed(rank)

    step = 0
    while step < args.steps:  # the training loop
        pick = torch.randint(len(trade), (args.batch,), generator=shuffled)
        guess = reader(grams[pick], margin[pick])
        if justice is None:
            loss = F.cross_entropy(guess, trade[pick])
        else:
            miss = F.cross_entropy(guess, trade[pick], reduction="none")
            weight = justice((pick % args.households).tolist(), miss.tolist())
            loss = (torch.tensor(weight) * miss).mean()
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        step += 1
        if step % 60 == 0 and rank == 0:
            print("step", step, "loss", round(loss.item(), 4), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
