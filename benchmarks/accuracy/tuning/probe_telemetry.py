"""What will a space probe report next? A causal transformer on its housekeeping data.

The passages lie in the archive of the ground station, which takes a while to answer each request.
"""

import argparse
import functools
import math
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CHANNELS, LENGTH, PASSAGES = 24, 192, 4


class GroundStation(IterableDataset):
    """Batches of passages, each worker asks for its own."""

    def __init__(self, latency, seed=8):
        self.latency, self.seed = latency / 1000, seed

    def request(self, rng):
        time.sleep(self.latency * rng.uniform(0.9, 1.1))  # the archive answers
        walk = rng.normal(0, 60, (PASSAGES, LENGTH + 1, CHANNELS)).cumsum(1)
        return walk.clip(-32000, 32000).astype("<i2").tobytes()

    def decode(self, packet):
        counts = np.frombuffer(packet, "<i2").reshape(PASSAGES, LENGTH + 1, CHANNELS)
        return torch.from_numpy(counts.astype(np.float32) / 500)

    def __iter__(self):
        worker = get_worker_info()
        rng = np.random.default_rng((self.seed, worker.id if worker else 0))
        while True:
            yield self.decode(self.request(rng))


def usual_change(seed=80):
    """how much each channel changes from one report to the next, from a long quiet time"""
    change = np.random.default_rng(seed).normal(0, 60, (100_000, CHANNELS)) / 500
    return torch.from_numpy(change.std(0).astype(np.float32))


def by_the_book(q, k, v):
    """softmax(QK' / sqrt(d)) V, with nothing seen of the future"""
    likeness = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    future = torch.ones(likeness.shape[-2:], dtype=torch.bool).triu(1)
    likeness = likeness.masked_fill(future, float("-inf"))
    return torch.softmax(likeness, dim=-1) @ v


class Layer(nn.Module):
    def __init__(self, dim, heads, look):
        super().__init__()
        self.heads, self.look = heads, look
        self.norm, self.qkv, self.out = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            self.qkv(self.norm(x))
            .view(b, t, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        x = x + self.out(self.look(q, k, v).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(x)


class Forecaster(nn.Module):
    def __init__(self, change, dim=48, heads=3, layers=7, written_out=0):
        super().__init__()
        usual = functools.partial(F.scaled_dot_product_attention, is_causal=True)
        self.register_buffer("change", change)
        self.enter = nn.Linear(CHANNELS, dim)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, dim))
        self.layers = nn.Sequential(
            *[Layer(dim, heads, by_the_book if n < written_out else usual) for n in range(layers)]
        )
        self.leave = nn.Linear(dim, CHANNELS)

    def forward(self, x):
        return x + self.change * self.leave(self.layers(self.enter(x) + self.place))


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--latency", type=float, default=60, help="milliseconds until the archive answers")
    parser.add_argument("--by-the-book", type=int, default=0, help="layers that follow the paper's formula")
    return parser.parse_args()


def main(args):
    torch.manual_seed(8)
    loader = DataLoader(GroundStation(args.latency), batch_size=None, num_workers=args.workers)
    net = Forecaster(usual_change(), written_out=args.by_the_book)
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    passages = iter(loader)
    for step in range(1, args.steps + 1):  # the training loop
        x = next(passages)
        loss = F.smooth_l1_loss(net(x[:, :-1]), x[:, 1:])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 50 == 0:
            print(f"step {step}: {loss.item():.4f}")


if __name__ == "__main__":
    main(parse())
