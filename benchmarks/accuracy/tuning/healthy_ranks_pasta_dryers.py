"""Moisture of pasta in the dryer; two halls, a rank for each. Four portions make a step, the gradients travel
with the last of them only. Both ranks say now and then how they are, with one small sum.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def hall(rank, count):
    draw = torch.Generator().manual_seed(60 + rank)
    climate = torch.randn(count, 20, generator=draw)
    shape = torch.randint(12, (count,), generator=draw)
    moisture = torch.tanh(climate[:, :10] * climate[:, 10:]).sum(1) + 0.1 * shape
    return climate, shape, moisture


class Dryer(nn.Module):
    def __init__(self, width=192, depth=5):
        super().__init__()
        self.shape = nn.Embedding(12, width)
        self.climate = nn.Linear(20, width)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)
            )
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, climate, shape):
        x = self.climate(climate) + self.shape(shape)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x).squeeze(1)


def step_of(net, optimizer, data, size, draw):
    portions = torch.randint(len(data[0]), (4, size), generator=draw)
    total = torch.zeros(())
    for number, rows in enumerate(portions):
        with contextlib.nullcontext() if number == 3 else net.no_sync():
            climate, shape, moisture = (part[rows] for part in data)
            loss = nn.functional.mse_loss(net(climate, shape), moisture) / 4
            loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--portion", type=int, default=72)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    net = DistributedDataParallel(Dryer(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    data, draw = hall(rank, 30_000), torch.Generator().manual_seed(rank)
    for step in range(args.steps):  # the training loop
        loss = step_of(net, optimizer, data, args.portion, draw)
        if step % 50 == 0:
            dist.all_reduce(loss)
            if rank == 0:
                print(f"{step}: {loss.item() / dist.get_world_size():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
