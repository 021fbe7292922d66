"""Two ranks tell the climate from pollen in peat cores: two micro-batches a step, and a common report now and then."""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEPTHS, SPECIES = 32, 24


class Attention(nn.Module):
    def __init__(self, size, heads=4):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.feed = nn.Sequential(
            nn.LayerNorm(size), nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)
        )

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class Climate(nn.Module):
    def __init__(self, size=64):
        super().__init__()
        self.place = nn.Parameter(0.02 * torch.randn(DEPTHS, size))
        self.enter = nn.Linear(SPECIES, size)
        self.blocks = nn.Sequential(Attention(size), Attention(size))
        self.exit = nn.Linear(size, 1)

    def forward(self, pollen):
        return self.exit(self.blocks(self.enter(pollen) + self.place)).squeeze(-1)


def cores(count):
    dice = torch.Generator().manual_seed(12)
    warmth = torch.randn(count, DEPTHS, generator=dice).cumsum(1) / 5
    likes = torch.randn(SPECIES, generator=dice)
    pollen = warmth[:, :, None] * likes + 0.5 * torch.randn(count, DEPTHS, SPECIES, generator=dice)
    return TensorDataset(pollen, warmth)


def batches(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(30)
    data = cores(3000)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    source = batches(DataLoader(data, batch_size=12, sampler=sampler, drop_last=True), sampler)
    model = DistributedDataParallel(Climate(), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    seen = torch.zeros(())
    for step in range(1, args.steps + 1):  # the training loop
        for half in range(2):
            pollen, warmth = next(source)
            with model.no_sync() if half == 0 else nullcontext():
                loss = (model(pollen) - warmth).square().mean() / 2
                loss.backward()
            seen += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        if step % 40 == 0:
            dist.all_reduce(seen)
            if rank == 0:
                print(
                    f"step {step}: squared error {seen.item() / 40 / dist.get_world_size():.3f}", flush=True
                )
            seen.zero_()
    if rank == 0:
        torch.save(model.module.state_dict(), os.devnull)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
