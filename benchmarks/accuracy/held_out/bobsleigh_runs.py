"""Finish times of bobsleigh runs, from start push, ice and line; a wave network, trained by two ranks."""

import argparse
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

FACTS, BATCH = 16, 192


@dataclass
class Run:
    facts: Tensor
    seconds: Tensor

    def __len__(self):
        return len(self.seconds)

    def batch(self, number):
        start = number * BATCH % (len(self) - BATCH)
        return self.facts[start : start + BATCH], self.seconds[start : start + BATCH]


def season(seed, runs=12_288):
    g = torch.Generator().manual_seed(seed)
    facts = torch.rand(runs, FACTS, generator=g) * 2 - 1
    seconds = (3 * facts[:, 0]).sin() + facts[:, 1] * facts[:, 2] + 0.5 * facts[:, 3:8].square().sum(1)
    return Run(facts, seconds[:, None])


class Waves(nn.Module):
    """Sines of many pitches, which are learned."""

    def __init__(self, waves):
        super().__init__()
        self.pitch = nn.Parameter(torch.randn(waves, FACTS) * 2)
        self.phase = nn.Parameter(torch.rand(waves) * math.tau)
        self.mix = nn.Parameter(torch.randn(128, waves) / math.sqrt(waves))

    def forward(self, facts):
        facts = facts.to(self.pitch.dtype)
        return torch.sin(facts @ self.pitch.T + self.phase) @ self.mix.T


class Clock(nn.Module):
    def __init__(self, waves, timing):
        super().__init__()
        self.waves = Waves(waves)
        if timing:
            self.waves.to(torch.float64)
        width = 256
        self.body = nn.Sequential(
            nn.Linear(128 + FACTS, width),
            nn.SiLU(),
            *(layer for _ in range(5) for layer in (nn.Linear(width, width), nn.SiLU())),
            nn.Linear(width, 1),
        )

    def forward(self, facts):
        waves = self.waves(facts).to(facts.dtype)
        return self.body(torch.cat([waves, facts], dim=1))


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--waves", type=int, default=64, help="sines in the first layer")
    parser.add_argument("--timing", action="store_true", help="for times in thousandths of a second")
    parser.add_argument("--tracks", type=int, default=0, help="tracks with a record the ranks agree on")
    return parser.parse_args()


def train(args):
    rank = int(os.environ["RANK"])
    torch.manual_seed(77)
    clock = Clock(args.waves, args.timing)
    model = nn.parallel.DistributedDataParallel(clock, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    runs = season(rank)
    records = [torch.full((1,), 1e3) for _ in range(args.tracks)]

    for number in range(args.steps):  # the training loop
        facts, seconds = runs.batch(number)
        loss = (model(facts) - seconds).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for track, record in enumerate(records):
            torch.minimum(record, seconds[track % BATCH], out=record)
            dist.all_reduce(record, op=dist.ReduceOp.MIN)
        if number % 50 == 49 and rank == 0:
            print(f"run {number + 1}: {loss.item():.4f} s^2", flush=True)


if __name__ == "__main__":
    options = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options)
    dist.barrier()
    dist.destroy_process_group()
