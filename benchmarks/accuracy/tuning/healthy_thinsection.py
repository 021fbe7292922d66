"""Segments the minerals in thin sections of rock, on all ranks, two portions to a step."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MINERALS, SIDE = 5, 40


def double(before, after, stride=1):
    return nn.Sequential(
        nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(4, after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1, bias=False),
        nn.GroupNorm(4, after),
        nn.ReLU(),
    )


class Petrographer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.fine, self.coarse = double(3, width), double(width, 2 * width, stride=2)
        self.raise_ = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.join, self.head = double(width, width), nn.Conv2d(width, MINERALS, 1)

    def forward(self, x):
        fine = self.fine(x)
        return self.head(self.join(fine + self.raise_(self.coarse(fine))))


def make_sections(amount, generator):
    blobs = torch.randn(amount, MINERALS, 5, 5, generator=generator)
    grains = F.interpolate(blobs, size=(SIDE, SIDE), mode="bilinear").argmax(1)
    colours = torch.rand(MINERALS, 3, generator=torch.Generator().manual_seed(7))
    noise = 0.2 * torch.randn(amount, 3, SIDE, SIDE, generator=generator)
    return colours[grains].permute(0, 3, 1, 2).contiguous() + noise, grains


def portions(x, y, size, generator):
    """Yields two portions at a time."""
    while True:
        for rows in torch.randperm(len(x), generator=generator).split(2 * size):
            yield [(x[half], y[half]) for half in rows.split(size)]


def mean_over_ranks(values):
    mean = torch.stack(values).mean()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--portion", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    torch.manual_seed(31)
    model = DistributedDataParallel(Petrographer(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    generator = torch.Generator().manual_seed(rank)
    x, y = make_sections(args.portion * 60, generator)
    dist.barrier()
    recent = []
    for step, pair in zip(
        range(args.steps), portions(x, y, args.portion, generator), strict=False
    ):  # the training loop
        for number, (image, grains) in enumerate(pair):
            with nullcontext() if number == len(pair) - 1 else model.no_sync():
                loss = F.cross_entropy(model(image), grains) / len(pair)
                loss.backward()
            recent.append(loss.detach() * len(pair))
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 49:
            mean = mean_over_ranks(recent)
            recent.clear()
            if rank == 0:
                print(f"step {step + 1}: loss {mean:.4f} on all ranks")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
