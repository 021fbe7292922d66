"""Self-supervised pressures in water networks: some junctions are hidden, a graph net fills them in. Two ranks, gloo.

The pipes of all networks are the same, the demand differs. Two micro-batches per rank and update; only the second one
exchanges gradients.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

JUNCTIONS, PIPES, WIDTH = 96, 160, 64


def network(generator):
    """A ring with chords."""
    ring = torch.arange(JUNCTIONS)
    source = torch.cat([ring, torch.randint(0, JUNCTIONS, (PIPES - JUNCTIONS,), generator=generator)])
    target = torch.cat(
        [(ring + 1) % JUNCTIONS, torch.randint(0, JUNCTIONS, (PIPES - JUNCTIONS,), generator=generator)]
    )
    conductance = torch.rand(PIPES, generator=generator) + 0.5
    mixing = torch.zeros(JUNCTIONS, JUNCTIONS)
    mixing.index_put_((source, target), conductance, accumulate=True)
    mixing = mixing + mixing.T
    return mixing / mixing.sum(1, keepdim=True)


def pressures(mixing, count, generator):
    demand = torch.randn(JUNCTIONS, count, generator=generator)
    level = demand
    for _ in range(6):
        level = 0.8 * (mixing @ level) + 0.2 * demand
    level = level / level.std()
    return torch.stack([level.T, demand.T], -1).contiguous()


class Exchange(nn.Module):
    """Each junction hears the mean of its neighbours."""

    def __init__(self, mixing):
        super().__init__()
        self.register_buffer("mixing", mixing)
        self.norm = nn.LayerNorm(WIDTH)
        self.own = nn.Linear(WIDTH, WIDTH)
        self.heard = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + F.silu(self.own(y) + self.mixing @ self.heard(y))


class LeakNet(nn.Module):
    def __init__(self, mixing, rounds=4):
        super().__init__()
        self.inlet = nn.Linear(3, WIDTH)
        self.rounds = nn.ModuleList(Exchange(mixing) for _ in range(rounds))
        self.outlet = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.inlet(x)
        for exchange in self.rounds:
            x = exchange(x)
        return self.outlet(x).squeeze(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--networks", type=int, default=24, help="per rank and micro-batch")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)

    mixing = network(torch.Generator().manual_seed(5))
    mine = torch.Generator().manual_seed(50 + rank)
    data = pressures(mixing, 4000, mine)
    model = DDP(LeakNet(mixing), gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 20)

    for step in range(args.steps):  # the training loop
        share_hidden = 0.15 + 0.25 * step / args.steps  # harder with time
        for micro in range(2):
            first = (2 * step + micro) * args.networks % (len(data) - args.networks)
            level, demand = data[first : first + args.networks].unbind(-1)
            hidden = (torch.rand(level.shape, generator=mine) < share_hidden).float()
            x = torch.stack([level * (1 - hidden), demand, hidden], -1)
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                miss = (model(x) - level) * hidden
                loss = miss.square().sum() / (share_hidden * level.numel())
                (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        warm.step()
        if rank == 0 and step % 50 == 49:
            print(f"{step + 1}: {loss.item():.4f} with {share_hidden:.0%} hidden", flush=True)

    with torch.no_grad():
        drift = sum(p.norm() for p in model.parameters())
    dist.all_reduce(drift)
    if rank == 0:
        print("weights", round(drift.item() / world, 3))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
