"""Energy and direction of air showers from the hits in a muon detector; torchrun, two ranks on gloo."""

import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HITS = 16


class Mixing(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class ShowerNet(nn.Module):
    """The same network for all hits, and another one for their mean."""

    def __init__(self, width=64, depth=3):
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.hits = nn.Sequential(*(Mixing(width) for _ in range(depth)))
        self.event = nn.Sequential(*(Mixing(width) for _ in range(depth)))
        self.leave = nn.Linear(width, 4)

    def forward(self, hits):
        return self.leave(self.event(self.hits(self.enter(hits)).mean(1)))


def simulate(count, seed):
    rng = np.random.default_rng(seed)
    energy = rng.exponential(1.0, (count, 1))
    axis = rng.normal(0, 0.15, (count, 3)) + [0, 0, 1]
    axis /= np.sqrt(np.square(axis).sum(1, keepdims=True))
    place = rng.normal(0, 1, (count, HITS, 2)) * (1 + 0.3 * energy[:, None])
    delay = -(place * axis[:, None, :2]).sum(2) / axis[:, 2:] + 0.02 * rng.normal(0, 1, (count, HITS))
    charge = np.log1p(rng.gamma(1 + 3 * energy, 1.0, (count, HITS)))
    hits = np.concatenate([place, delay[..., None], charge[..., None], np.hypot(*place.T).T[..., None]], 2)
    truth = np.concatenate([np.log1p(energy), axis], 1)
    return torch.from_numpy(hits.astype(np.float32)), torch.from_numpy(truth.astype(np.float32))


def shares(events, favour):
    """Events of each rank. The second node has been the faster one, and may be given more of them."""
    half = events // 2
    return half - favour, events - half + favour


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--events", type=int, default=160, help="in a step, of both ranks")
    parser.add_argument(
        "--favour", type=int, default=0, help="events that the second rank takes off the first"
    )
    parser.add_argument(
        "--tolerant", action="store_true", help="as the model had optional heads in the past"
    )
    return parser.parse_args()


def main():
    args = parse()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(31)
    hits, truth = simulate(12_000, seed=100 + rank)
    net = DistributedDataParallel(
        ShowerNet(), find_unused_parameters=args.tolerant, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-3, fused=True)
    mine = shares(args.events, args.favour)[rank]
    order = torch.Generator().manual_seed(rank)
    step = 0
    while step < args.steps:  # the training loop
        rows = torch.randint(len(hits), (mine,), generator=order)
        # DDP takes the mean of both ranks: weight by events
        off = net(hits[rows]) - truth[rows]
        loss = off.square().sum() * (world / (4 * args.events))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
