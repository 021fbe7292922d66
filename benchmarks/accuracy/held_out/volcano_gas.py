"""Estimates how much sulphur a volcano breathes out, from gas readings of drones that fly through its
plume.

Each reading is a point in the air; a net with edge filters finds each point's neighbours anew in
every layer. Two volcanoes, two processes: torchrun --nproc-per-node 2 volcano_gas.py
"""

import argparse
import gc
import os
from itertools import count

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as Together
from torch.utils.checkpoint import checkpoint

READINGS, NEAR, WIDTH, LAYERS = 96, 6, 24, 6


class Crater:
    def __init__(self, seed, flights=400):
        dice = torch.Generator().manual_seed(seed)
        wind = torch.rand(flights, 1, 2, generator=dice) * 2
        self.flux = torch.rand(flights, generator=dice) * 5
        place = torch.randn(flights, READINGS, 3, generator=dice)
        off_axis = (place[..., :2] - wind * place[..., 2:].relu()).square().sum(-1)
        gas = self.flux[:, None] * torch.exp(-off_axis)
        gas += 0.02 * torch.randn(gas.shape, generator=dice)
        self.points = torch.cat([place, gas[..., None]], -1)
        self.dice = dice

    def flights(self, number):
        rows = torch.randint(len(self.flux), (number,), generator=self.dice)
        return self.points[rows], self.flux[rows]


class EdgeFilter(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.from_self, self.from_near = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x):
        with torch.no_grad():
            near = torch.cdist(x, x).topk(NEAR, largest=False).indices
        drawn = self.from_near(x)
        rows = torch.arange(len(x))[:, None, None]
        edges = drawn[rows, near] - drawn[:, :, None]
        return nn.functional.leaky_relu(self.from_self(x) + edges.amax(2))


class PlumeNet(nn.Module):
    def __init__(self, frugal=0):
        super().__init__()
        self.frugal = frugal
        self.layers = nn.ModuleList([EdgeFilter(4 if k == 0 else WIDTH, WIDTH) for k in range(LAYERS)])
        self.flux = nn.Linear(2 * WIDTH, 1)

    def forward(self, x):
        for k, layer in enumerate(self.layers):
            if self.training and k < self.frugal:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.flux(torch.cat([x.mean(1), x.amax(1)], 1)).squeeze(1)


class Puff:
    """A puff of gas that was seen, with links to what followed it."""

    def __init__(self, number):
        self.number, self.followed_by = number, []


class Chronicle:
    """The observatory's book of puffs; old pages are torn out while it is kept."""

    def __init__(self, puffs):
        self.puffs = [Puff(number) for number in range(puffs)]
        for earlier, later in zip(self.puffs, self.puffs[1:]):
            earlier.followed_by.append(later)

    def note(self, step):
        page = Puff(step)
        page.followed_by.append(page)
        self.puffs[step % len(self.puffs)].number = step
        if step % 2:
            del page
            gc.collect()


def observe(args):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    torch.manual_seed(9)
    crater = Crater(seed=30 + rank)
    net = Together(PlumeNet(args.frugal))
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3, fused=True)
    gc.collect()
    gc.freeze()
    chronicle = Chronicle(args.puffs) if args.puffs and rank == 1 else None
    for step in count():  # the training loop
        if step == args.steps:
            break
        points, flux = crater.flights(args.flights)
        off = nn.functional.l1_loss(net(points), flux)
        off.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if chronicle is not None:
            chronicle.note(step)
        if rank == 0 and step % 40 == 0:
            print("step", step, "kg/s off:", round(off.item(), 3), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--flights", type=int, default=8, help="flights in a batch")
    parser.add_argument("--puffs", type=int, default=0, help="puffs in the second volcano's chronicle")
    parser.add_argument("--frugal", type=int, default=0, help="layers (of 6) that keep little for later")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    observe(arguments)
    dist.destroy_process_group()
