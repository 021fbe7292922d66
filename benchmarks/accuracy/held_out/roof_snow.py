"""Nowcasts the load of snow on roofs. One process for each of two valleys, joined after every update.

torchrun --nproc-per-node 2 roof_snow.py
"""

import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SENSORS = 7


class Valley:
    """Hourly weather of 500 roofs, and the load that it left on them."""

    def __init__(self, rank, hours):
        noise = np.random.default_rng(700 + rank)
        weather = noise.normal(size=(500, hours, SENSORS)).astype(np.float32)
        melt = np.exp(-np.arange(hours)[::-1] / 12)
        load = (np.maximum(weather[:, :, 0], 0) * melt).sum(1) - 0.3 * weather[:, -6:, 1].sum(1)
        self.weather, self.load = torch.from_numpy(weather), torch.from_numpy(load.astype(np.float32))
        self.picks = torch.Generator().manual_seed(rank)

    def __iter__(self):
        return self

    def __next__(self):
        rows = torch.randint(len(self.load), (24,), generator=self.picks)
        return self.weather[rows], self.load[rows]


class SnowCell(nn.Module):
    """A gated layer over the hours, written out hour by hour."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.read = nn.Linear(SENSORS, 2 * hidden)
        self.keep = nn.Linear(hidden, 2 * hidden)

    def forward(self, weather):
        pack = weather.new_zeros(len(weather), self.hidden)
        for falling in self.read(weather).unbind(1):
            gate, fresh = (falling + self.keep(pack)).chunk(2, dim=1)
            pack = torch.lerp(pack, torch.tanh(fresh), torch.sigmoid(gate))
        return pack


class RoofModel(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.cell = SnowCell(hidden)
        self.load = nn.Sequential(nn.LayerNorm(hidden), nn.Linear(hidden, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, weather):
        return self.load(self.cell(weather)).squeeze(1)


class Winter:
    """The pace of learning follows the mean warmth of a winter that is put together from gusts."""

    def __init__(self, gusts):
        self.gusts = gusts

    def __call__(self, step):
        pace = 1 / math.sqrt(1 + step / 100)
        if not self.gusts:
            return pace
        warmth = 0.0
        for gust in range(self.gusts):
            warmth += math.sin(0.01 * step + gust) * math.exp(-gust / self.gusts)
        return pace * (1 + 0.1 * math.tanh(warmth / self.gusts))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hours", type=int, default=36, help="hours of weather that are looked at")
    parser.add_argument(
        "--north-hours", type=int, default=0, help="hours more in the north, where the snow stays longer"
    )
    parser.add_argument("--gusts", type=int, default=0, help="gusts that a winter is put together from")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(12)
    model = DistributedDataParallel(RoofModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    pace = torch.optim.lr_scheduler.LambdaLR(optimizer, Winter(args.gusts))
    valley = Valley(rank, args.hours + (args.north_hours if rank == 1 else 0))

    for step, (weather, load) in zip(range(args.steps), valley):  # the training loop
        optimizer.zero_grad()
        loss = F.mse_loss(model(weather), load)
        loss.backward()
        optimizer.step()
        pace.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step}, squared error {loss.item():.3f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
