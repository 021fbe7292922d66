"""Where does each starling of a murmuration turn next?  All birds look at all birds, eight times over.

Start with torchrun; every rank follows the flocks of one camera.
"""

import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Glance(nn.Module):
    """One round: what a bird sees of every other one is averaged, and bends its own state."""

    def __init__(self, size):
        super().__init__()
        self.mine = nn.Linear(size, size)
        self.theirs = nn.Linear(size, size, bias=False)
        self.pair = nn.Linear(size, size)
        self.gate = nn.Linear(2 * size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, birds):
        seen = F.silu(self.mine(birds).unsqueeze(0) + self.theirs(birds).unsqueeze(1))
        news = F.silu(self.pair(seen)).mean(1)
        return self.norm(birds + self.gate(torch.cat((birds, news), -1)))


class Murmuration(nn.Module):
    def __init__(self, size=32, rounds=8):
        super().__init__()
        self.enter = nn.Linear(6, size)
        self.glances = nn.Sequential(*(Glance(size) for _ in range(rounds)))
        self.leave = nn.Linear(size, 3)

    def forward(self, states):
        return self.leave(self.glances(self.enter(states)))


def film(camera, longest):
    """Yields flock after flock: asked for a number of birds, it answers with states and turns."""
    random = torch.Generator().manual_seed(100 + camera)
    places = torch.randn(64, longest, 3, generator=random)
    speeds = torch.randn(64, longest, 3, generator=random)
    birds = yield
    for flock in itertools.cycle(range(64)):
        x, v = places[flock, :birds], speeds[flock, :birds]
        turn = 0.4 * (v.mean(0) - v) + 0.2 * (x.mean(0) - x)
        birds = yield torch.cat((x, v), 1), turn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--birds", type=int, default=64, help="birds in a flock")
    parser.add_argument(
        "--spread", type=int, default=0, help="take flocks as they are filmed, up to so many birds off"
    )
    parser.add_argument("--parcels", type=int, default=0, help="hand the updates over in so many parcels")
    opt = parser.parse_args()

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    torch.manual_seed(31)
    net = Murmuration()
    settings = {}
    if opt.parcels:
        megabytes = sum(p.numel() * p.element_size() for p in net.parameters()) / 2**20
        settings["bucket_cap_mb"] = megabytes / opt.parcels
    flockwise = DistributedDataParallel(net, gradient_as_bucket_view=True, **settings)
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)

    camera = film(rank, opt.birds + opt.spread)
    next(camera)
    for step in range(1, opt.steps + 1):  # the training loop
        side = 1 if (step + rank) % 2 else -1
        states, turns = camera.send(max(opt.birds + side * opt.spread, 4))
        loss = F.mse_loss(flockwise(states), turns)
        adam.zero_grad()
        loss.backward()
        adam.step()
        if rank == 0 and step % 50 == 0:
            print(f"flock {step}: error {loss.item():.4f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
