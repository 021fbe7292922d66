"""Watches salt pans from above: how much brine is left in each? Two processes, each with half of the
pans.

Gradients of two half batches are added up before the processes talk to each other, and the first
process looks at pans that were put aside, once in a while. torchrun --nproc-per-node 2
healthy_ranks_salt_pans.py
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BANDS, SIDE, HALVES = 5, 24, 2


def pans(number, dice):
    """Multispectral pictures; wet ground is dark in the last band."""
    fill = torch.rand(number, generator=dice)
    slope = torch.linspace(0, 1, SIDE)[None, :, None] + 0.2 * torch.rand(number, SIDE, SIDE, generator=dice)
    wet = (slope < fill[:, None, None] * 1.2).float()
    ground = torch.rand(number, BANDS, SIDE, SIDE, generator=dice)
    ground[:, -1] = 0.2 * ground[:, -1] + 0.8 * (1 - wet)
    return ground, fill


class Mixing(nn.Module):
    """Mixes the patches of a picture, then the channels of a patch."""

    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
        self.within = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class BrineNet(nn.Module):
    def __init__(self, width=64, patch=4, depth=3):
        super().__init__()
        self.cut = nn.Conv2d(BANDS, width, patch, stride=patch)
        self.mix = nn.Sequential(*(Mixing((SIDE // patch) ** 2, width) for _ in range(depth)))
        self.fill = nn.Linear(width, 1)

    def forward(self, pictures):
        return self.fill(self.mix(self.cut(pictures).flatten(2).transpose(1, 2)).mean(1)).squeeze(1)


def main(steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(40)
    model = DistributedDataParallel(BrineNet(), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    dice = torch.Generator().manual_seed(rank)
    pictures, fills = pans(800, dice)
    aside = pans(16, torch.Generator().manual_seed(99)) if rank == 0 else None

    for step in range(steps):  # the training loop
        for half in range(HALVES):
            rows = torch.randint(len(fills), (16,), generator=dice)
            quiet = model.no_sync() if half < HALVES - 1 else contextlib.nullcontext()
            with quiet:
                loss = nn.functional.mse_loss(model(pictures[rows]), fills[rows]) / HALVES
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 50 == 0:
            with torch.no_grad():
                off = (model.module(aside[0]) - aside[1]).abs().mean()
            print(f"step {step}: off by {off.item():.3f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
