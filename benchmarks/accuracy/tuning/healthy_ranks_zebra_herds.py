"""Which herd do these collars belong to? A small transformer over days of movement, on two ranks (gloo)."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DAYS, FEATURES, HERDS = 32, 8, 6


def collars(count, habits, generator):
    herd = torch.randint(HERDS, (count,), generator=generator)
    noise = torch.randn(count, DAYS, FEATURES, generator=generator)
    day = torch.arange(DAYS)[:, None] / DAYS
    rhythm = torch.sin(6.28 * (day * (1 + herd[:, None, None]) + habits[herd][:, None]))
    return noise + 0.7 * rhythm, herd


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        return x + self.narrow(F.gelu(self.wide(self.norm2(x)), approximate="tanh"))


class Herds(nn.Module):
    def __init__(self, dim=96, layers=2, heads=4):
        super().__init__()
        self.embed = nn.Linear(FEATURES, dim)
        self.days = nn.Parameter(0.02 * torch.randn(DAYS, dim))
        self.layers = nn.Sequential(*(Layer(dim, heads) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, HERDS))

    def forward(self, x):
        return self.head(self.layers(self.embed(x) + self.days).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="collars on each rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    habits = torch.randn(HERDS, FEATURES)
    generator = torch.Generator().manual_seed(rank)
    x, herd = collars(8000, habits, generator)
    model = DDP(Herds(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, fused=True)
    order = torch.randperm(len(x), generator=generator)
    per_pass = len(x) // args.batch
    for step in range(args.steps):  # the training loop
        first = step % per_pass * args.batch
        rows = order[first : first + args.batch]
        loss = F.cross_entropy(model(x[rows]), herd[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 100 == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
