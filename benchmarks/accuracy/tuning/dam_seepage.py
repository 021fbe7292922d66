"""Pore pressures below an earth dam, a surrogate for the flow solver; torchrun with two ranks.

Each rank has a flank of the valley: its own sites, the same network.
"""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def boreholes(count, rank):
    ground = np.random.default_rng(0)
    mix, out = ground.standard_normal((12, 10)), ground.standard_normal((10, 6)) / 3
    site = np.random.default_rng(1 + rank).uniform(-1, 1, (count, 12))
    pressure = np.sin(site @ mix) @ out
    return torch.from_numpy(site.astype(np.float32)), torch.from_numpy(pressure.astype(np.float32))


class Stratum(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)
        nn.init.normal_(self.second.weight, std=0.02)

    def forward(self, x):
        y = F.layer_norm(x, x.shape[-1:])
        return x + self.second(F.silu(self.first(y)))


class Seepage(nn.Module):
    def __init__(self, width=64, depth=44):
        super().__init__()
        self.enter = nn.Linear(12, width)
        self.strata = nn.ModuleList([Stratum(width) for _ in range(depth)])
        self.relax = nn.Sequential(
            nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width), nn.Tanh()
        )
        self.leave = nn.Linear(width, 6)

    def forward(self, site, sweeps):
        x = self.enter(site)
        for stratum in self.strata:
            x = stratum(x)
        for _ in range(sweeps):
            x = torch.add(x, self.relax(x), alpha=0.1)
        return self.leave(x)


def wrap(net, pieces):
    extra = {}
    if pieces:
        # so that the first of them are on their way while the others are still computed
        megabytes = sum(p.numel() * p.element_size() for p in net.parameters()) / 2**20
        extra["bucket_cap_mb"] = megabytes / pieces
    return DistributedDataParallel(net, gradient_as_bucket_view=True, **extra)


def train(args, rank, world):
    torch.manual_seed(5)
    site, pressure = boreholes(150_000, rank)
    net = wrap(Seepage(), args.pieces)
    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    draw = torch.Generator().manual_seed(100 + rank)
    # the last flank is steep: there the water table takes more sweeps until it rests
    sweeps = 2 + (args.steep_sweeps if rank == world - 1 else 0)
    for step in range(args.steps):  # the training loop
        rows = torch.randint(len(site), (args.sites,), generator=draw)
        loss = F.mse_loss(net(site[rows], sweeps), pressure[rows])
        adam.zero_grad()
        loss.backward()
        adam.step()
        if rank == 0 and step % 50 == 0:
            print(f"{step}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sites", type=int, default=320, help="sites in the batch of a rank")
    parser.add_argument("--pieces", type=int, default=0, help="send the gradients in so many pieces")
    parser.add_argument("--steep-sweeps", type=int, default=0, help="further sweeps on the steep flank")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(options, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    dist.destroy_process_group()
