"""Travel times on a road network, by a graph network; two ranks, two micro-batches for each update.

torchrun --nproc-per-node 2 healthy_traffic_graphs.py
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NODES, EDGES, MICRO, BATCH = 220, 900, 2, 4


def road_network(gen):
    place = torch.rand(NODES, 2, generator=gen)
    near = torch.cdist(place, place).topk(6, largest=False).indices[:, 1:]
    src = torch.arange(NODES).repeat_interleave(5)
    dst = near.flatten()
    keep = torch.randperm(len(src), generator=gen)[:EDGES]
    src, dst = src[keep], dst[keep]
    return src, dst, (place[src] - place[dst]).norm(dim=1)


def simulate(days, src, dst, length, gen):
    """flow of cars on the edges, spread by a few rounds of diffusion, and the times that result"""
    flow = torch.rand(days, EDGES, generator=gen) ** 3
    for _ in range(3):
        node = torch.zeros(days, NODES).index_add_(1, dst, flow)
        flow = 0.7 * flow + 0.06 * node[:, src]
    time = length * (1 + 0.15 * (flow * 2) ** 4)
    return torch.stack([flow, length.expand(days, -1)], -1), time


class Messages(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * width, width), nn.SiLU(), nn.Linear(width, width))
        self.node = nn.Linear(2 * width, width)

    def forward(self, h, e, src, dst):
        e = e + self.edge(torch.cat([h[:, src], h[:, dst], e], -1))
        got = torch.zeros_like(h).index_add(1, dst, e)
        return h + F.silu(self.node(torch.cat([h, got], -1))), e


class RoadNet(nn.Module):
    def __init__(self, width=32, rounds=2):
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.place = nn.Parameter(torch.randn(NODES, width) * 0.1)
        self.rounds = nn.ModuleList(Messages(width) for _ in range(rounds))
        self.out = nn.Linear(width, 2)

    def forward(self, x, src, dst):
        e, h = self.enter(x), self.place.expand(len(x), -1, -1)
        for messages in self.rounds:
            h, e = messages(h, e, src, dst)
        return self.out(e + h[:, src])


def pinball(out, y):
    """median and 90 % quantile"""
    q = out.new_tensor([0.5, 0.9])
    miss = y[..., None] - out
    return torch.maximum(q * miss, (q - 1) * miss).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=200)
    args = ap.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(21)
    src, dst, length = road_network(torch.Generator().manual_seed(2))
    gen = torch.Generator().manual_seed(50 + rank)
    x, y = simulate(400, src, dst, length, gen)

    net = DistributedDataParallel(RoadNet(), gradient_as_bucket_view=True)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    for step in range(args.steps):  # the training loop
        picks = torch.randint(len(x), (MICRO, BATCH), generator=gen)
        for i, pick in enumerate(picks):
            last = i == MICRO - 1
            with contextlib.nullcontext() if last else net.no_sync():
                loss = pinball(net(x[pick], src, dst), y[pick])
                (loss / MICRO).backward()
        opt.step()
        opt.zero_grad()
        if step % 50 == 0:
            shared = loss.detach().clone()
            dist.all_reduce(shared)
            if rank == 0:
                print(f"step {step}: {shared.item() / 2:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
