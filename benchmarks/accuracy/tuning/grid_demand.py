"""Forecasts tomorrow's electricity demand from the week before; each process has one region of the grid."""

import argparse
import random
from itertools import islice

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

WEEK, DAY, PATCH = 168, 24, 4


class Region(Dataset):
    """Load and temperature of a region by the hour, cut into a week and the day that follows."""

    def __init__(self, number, windows=600, feeders=0):
        rng = np.random.default_rng(70 + number)
        hours = np.arange(windows + WEEK + DAY)
        load = np.sin(hours * 2 * np.pi / DAY) + 0.4 * np.sin(hours * 2 * np.pi / WEEK)
        load += 0.1 * rng.standard_normal(len(hours))
        warmth = np.cos(hours * 2 * np.pi / DAY + number) + 0.2 * rng.standard_normal(len(hours))
        self.series = torch.from_numpy(np.stack([load, warmth], 1).astype(np.float32))
        self.windows, self.feeders = windows, feeders
        self.readings = [
            [",".join(f"{value:.4f}" for value in 0.01 * rng.standard_normal(WEEK)) for _ in range(feeders)]
            for _ in range(windows // WEEK + 1)
        ]

    def __len__(self):
        return self.windows

    def feeder_load(self, week):
        """The load of a random draw of the week's feeders, as the distribution company exports them."""
        total = np.zeros(WEEK, dtype=np.float32)
        for line in random.choices(self.readings[week], k=self.feeders):
            total += np.array([float(value) for value in line.split(",")], dtype=np.float32)
        return torch.from_numpy(total)

    def __getitem__(self, index):
        past = self.series[index : index + WEEK]
        if self.feeders:
            past = past.clone()
            past[:, 0] += self.feeder_load(index // WEEK)
        return past, self.series[index + WEEK : index + WEEK + DAY, 0]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, w = x.shape
        q, k, v = self.qkv(self.before(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, w)
        x = x + self.out(seen)
        return x + self.down(F.gelu(self.up(self.between(x))))


class Forecaster(nn.Module):
    def __init__(self, width=96, depth=3):
        super().__init__()
        self.patches = nn.Linear(2 * PATCH, width)
        self.places = nn.Parameter(0.02 * torch.randn(WEEK // PATCH, width))
        self.blocks = nn.Sequential(*[Block(width, 4) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, DAY)

    def forward(self, past):
        x = self.patches(past.reshape(len(past), WEEK // PATCH, 2 * PATCH)) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


@torch.no_grad()
def clip_to_weights(parameters, blocks, ratio=0.02):
    """Adaptive clipping (Brock et al. 2021): no block's gradient is larger than a part of its weights."""
    for parameter in parameters:
        count = min(blocks, len(parameter))
        parts = parameter.tensor_split(count), parameter.grad.tensor_split(count)
        for weights, grads in zip(*parts, strict=True):
            most = ratio * max(weights.norm().item(), 1e-3)
            norm = grads.norm().item()
            if norm > most:
                grads.mul_(most / norm)


def endless(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=12)
    parser.add_argument("--feeders", type=int, default=0, help="feeders of the second region")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of a weight for adaptive clipping")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(11 + rank)
    random.seed(11 + rank)

    region = Region(rank, feeders=args.feeders if rank == 1 else 0)
    loader = DataLoader(region, batch_size=args.rows, shuffle=True, drop_last=True)
    model = DistributedDataParallel(Forecaster())
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    days = islice(endless(loader), args.steps)
    for step, (past, tomorrow) in enumerate(days, 1):  # the training loop
        loss = F.huber_loss(model(past), tomorrow)
        optimizer.zero_grad()
        loss.backward()
        if args.blocks:
            clip_to_weights(parameters, args.blocks)
        else:
            nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
