"""Solubility of small molecules: message passing, two ranks, gradients of three micro-batches per step.

torchrun --nproc-per-node 2 healthy_solvent_graphs.py
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn

ATOMS, WIDTH, GRAPHS, MICRO = 24, 96, 11, 3


class Pass(nn.Module):
    def __init__(self):
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, source, sink):
        m = self.message(torch.cat([x[source], x[sink]], 1))
        return self.norm(x + torch.zeros_like(x).index_add(0, sink, m))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.atom = nn.Embedding(20, WIDTH)
        self.passes = nn.ModuleList(Pass() for _ in range(3))
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, kind, source, sink):
        x = self.atom(kind)
        for p in self.passes:
            x = p(x, source, sink)
        return self.out(x.view(GRAPHS, ATOMS, WIDTH).mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(13)

    net = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))

    g = torch.Generator().manual_seed(50 + rank)
    kinds = torch.randint(20, (900, ATOMS), generator=g)
    bonds = torch.randint(ATOMS, (900, 2, 60), generator=g)
    truth = kinds.float().mean(1) / 10 - 1
    offset = (torch.arange(GRAPHS) * ATOMS)[:, None]

    def batch():
        i = torch.randint(900, (GRAPHS,), generator=g)
        return (
            kinds[i].flatten(),
            (bonds[i, 0] + offset).flatten(),
            (bonds[i, 1] + offset).flatten(),
            truth[i],
        )

    total = torch.zeros(())
    for step in range(1, steps + 1):  # the training loop
        for micro in range(MICRO):
            kind, source, sink, y = batch()
            with net.no_sync() if micro < MICRO - 1 else contextlib.nullcontext():
                mean, log_variance = net(kind, source, sink).unbind(1)
                loss = 0.5 * (log_variance + (y - mean).square() * torch.exp(-log_variance)).mean() / MICRO
                loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 50 == 0:
            dist.reduce(total, 0)
            if rank == 0:
                print(f"step {step}: likelihood loss {total.item() / 100:.4f}", flush=True)
            total.zero_()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
