"""A code book for photos of seeds: a VQ-VAE, trained by two ranks under torchrun."""

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIDE, CODES, DIM = 24, 256, 64


def photos(count, generator):
    """bright ellipses with a stripe"""
    y, x = torch.meshgrid(torch.linspace(-1, 1, SIDE), torch.linspace(-1, 1, SIDE), indexing="ij")
    turn, long, wide, stripe = torch.rand(4, count, 1, 1, generator=generator)
    turn = 3.14 * turn
    a = x * turn.cos() + y * turn.sin()
    b = y * turn.cos() - x * turn.sin()
    body = torch.sigmoid(20 * (1 - (a / (0.4 + 0.5 * long)) ** 2 - (b / (0.2 + 0.3 * wide)) ** 2))
    return (body * (1 - 0.5 * torch.exp(-((b - 0.3 * stripe) ** 2) / 0.01))).flatten(1)


class SeedCoder(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        pixels = SIDE * SIDE
        self.encoder = nn.Sequential(nn.Linear(pixels, width), nn.ReLU(), nn.Linear(width, DIM))
        self.decoder = nn.Sequential(nn.Linear(DIM, width), nn.ReLU(), nn.Linear(width, pixels))
        self.book = nn.Parameter(torch.randn(CODES, DIM) / 8)

    def forward(self, x):
        z = self.encoder(x)
        with torch.no_grad():
            choice = (self.book.square().sum(1) - 2 * z @ self.book.T).argmin(1)
        q = F.embedding(choice, self.book)
        out = self.decoder(z + (q - z).detach())
        return (
            F.mse_loss(out, x) + F.mse_loss(q, z.detach()) + 0.25 * F.mse_loss(z, q.detach()),
            choice,
            out,
        )


class Census:
    """How often each code is in use, over all ranks; codes that die out can then be replaced."""

    def __init__(self, codes):
        self.codes = min(codes, CODES)
        self.usage = torch.zeros(self.codes)

    def count(self, choice):
        for code in range(self.codes):
            here = (choice == code).sum(dtype=torch.float32)
            dist.all_reduce(here)
            self.usage[code].lerp_(here, 0.01)


class Sheet:
    """Photos beside what became of them; page and sheet know each other."""

    def __init__(self, photos, copies):
        self.page = {"sheet": self, "photos": photos, "copies": copies}


class Keeper:
    """Has the latest sheet at hand, and does not let memory fill up with old ones."""

    def __init__(self, rounds, epoch=40):
        self.rounds, self.epoch, self.sheet = rounds, epoch, None

    def __call__(self, step, photos, copies):
        self.sheet = Sheet(photos[:16], copies[:16].detach())
        due = (step + 1) * self.rounds // self.epoch - step * self.rounds // self.epoch
        for _ in range(due):
            gc.collect()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=320, help="photos per rank")
    parser.add_argument("--census", type=int, default=0, help="count the use of so many codes")
    parser.add_argument("--keep", type=int, default=0, help="keep sheets, and tidy so often in 40 steps")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(2)
    model = DistributedDataParallel(SeedCoder(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(100 + rank)
    data = photos(6000, generator)
    census = Census(args.census) if args.census else None
    keeper = Keeper(args.keep) if args.keep and rank == 0 else None

    step = 0
    while step < args.steps:  # the training loop
        x = data[torch.randint(len(data), (args.batch,), generator=generator)]
        loss, choice, out = model(x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if census:
            census.count(choice)
        if keeper:
            keeper(step, x, out)
        step += 1
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
