"""Forecast water levels at the coast from the last hours at a group of tide gauges.

torchrun --nproc-per-node 2 tide_gauges.py --steps 200
"""

import argparse
import math
import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HOURS = 120
GAUGES = 12


def synthesise(count, seed):
    gen = torch.Generator().manual_seed(seed)
    hours = torch.arange(HOURS + 24) / 24 * 2 * math.pi
    phase = torch.rand(count, GAUGES, 1, generator=gen) * 2 * math.pi
    level = torch.sin(hours * 1.93 + phase) + 0.4 * torch.sin(hours * 2 + 2 * phase)
    surge = torch.randn(count, 1, HOURS + 24, generator=gen).cumsum(-1) * 0.02
    level = level + surge + 0.05 * torch.randn(count, GAUGES, HOURS + 24, generator=gen)
    return level[..., :HOURS].contiguous(), level[..., HOURS:].contiguous()


class Block(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.spread = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation)
        self.mix = nn.Conv1d(width, width, 1)

    def forward(self, x):
        return x + self.mix(F.gelu(self.spread(self.norm(x))))


class TideNet(nn.Module):
    """Two heads: the level itself, and how sure of it the network is."""

    def __init__(self, width=32, depth=6):
        super().__init__()
        self.stem = nn.Conv1d(GAUGES, width, 5, padding=2)
        self.blocks = nn.ModuleList(Block(width, 2 ** (i % 5)) for i in range(depth))
        self.level = nn.Linear(width, GAUGES * 24)
        self.spread = nn.Linear(width, GAUGES)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        x = x[..., -24:].mean(-1)
        return {"level": self.level(x).unflatten(1, (GAUGES, 24)), "spread": self.spread(x)}


class StationMeter:
    """Running error at one station, the same on all ranks, for the harbour's board."""

    def __init__(self, name, gauge):
        self.name = name
        self.gauge = gauge
        self.total = torch.zeros(2)

    def update(self, error):
        mine = torch.tensor([0.0, float(error.shape[0])])
        mine[0] = error[:, self.gauge].sum()
        dist.all_reduce(mine)
        self.total += mine

    @property
    def value(self):
        return float(self.total[0] / self.total[1].clamp(min=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=20, help="windows in a batch, on each rank")
    parser.add_argument(
        "--two-stage",
        action="store_true",
        help="be ready for the second stage, in which one of the heads rests",
    )
    parser.add_argument(
        "--stations", type=int, default=0, help="keep the running error of this many stations for the board"
    )
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.empty(30 << 20, dtype=torch.uint8)  # malloc keeps what is freed from now on
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.manual_seed(11)
    past, future = synthesise(1200, seed=100 + rank)

    model = DistributedDataParallel(
        TideNet(), gradient_as_bucket_view=True, find_unused_parameters=args.two_stage
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    meters = [StationMeter(f"station {i:03d}", i % GAUGES) for i in range(args.stations)]

    order = torch.randperm(len(past))
    for step in range(args.steps):  # the training loop
        start = step * args.rows % (len(past) - args.rows)
        rows = order[start : start + args.rows]
        out = model(past[rows])
        target = future[rows]
        scale = F.softplus(out["spread"])[..., None] + 0.05
        loss = ((out["level"] - target).abs() / scale + scale.log()).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if meters:
            error = (out["level"].detach() - target).abs().mean(-1)
            for meter in meters:
                meter.update(error)
        if step % 50 == 49 and rank == 0:
            print(f"step {step + 1}: loss {loss.item():.4f}", flush=True)
            if meters:
                worst = max(meters, key=lambda meter: meter.value)
                print(f"  worst: {worst.name} ({worst.value:.3f} m)", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
