"""Learns coarse steps of a reacting flow from a fine simulation that runs along with the training."""

import argparse
import contextlib
import random

import torch
import torch.nn.functional as F
from torch import nn


class one_at_a_time(contextlib.ContextDecorator):
    """Sums in the same order whatever the machine, so that runs can be compared to the last bit."""

    def __enter__(self):
        self.before = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_):
        torch.set_num_threads(self.before)


class Melt:
    """Gray-Scott on a torus: feed and kill differ from cell to cell."""

    stencil = torch.tensor([[0.05, 0.2, 0.05], [0.2, -1.0, 0.2], [0.05, 0.2, 0.05]])

    def __init__(self, cells, grid, generator):
        self.shape, self.generator = (cells, 2, grid, grid), generator
        self.kernel = self.stencil.expand(2, 1, 3, 3).contiguous()
        self.spread = torch.tensor([1.0, 0.5]).view(1, 2, 1, 1)
        self.feed = torch.linspace(0.030, 0.055, cells).view(-1, 1, 1)
        self.kill = torch.linspace(0.060, 0.064, cells).view(-1, 1, 1)
        self.pour()

    def pour(self):
        cells, _, grid, _ = self.shape
        spots = torch.rand(cells, grid // 8, grid // 8, generator=self.generator) > 0.9
        second = F.interpolate(spots[:, None].float(), scale_factor=8)[:, 0] * 0.5
        self.state = torch.stack([1 - second, second], 1)

    @torch.no_grad()
    def advance(self, ticks):
        for _ in range(ticks):
            change = F.conv2d(F.pad(self.state, (1, 1, 1, 1), mode="circular"), self.kernel, groups=2)
            change.mul_(self.spread)
            first, second = self.state.unbind(1)
            reaction = (first * second).mul_(second)
            change[:, 0].sub_(reaction).add_((1 - first).mul_(self.feed))
            change[:, 1].add_(reaction).sub_(second * (self.feed + self.kill))
            self.state.add_(change)
        return self.state

    def coarse(self):
        return F.avg_pool2d(self.state, 2)


class Stepper(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(2, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 2, 3, padding=1),
        )

    def forward(self, field):
        return field + self.net(field)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--cells", type=int, default=8)
parser.add_argument("--grid", type=int, default=128)
parser.add_argument("--ticks", type=int, default=6, help="fine steps in a coarse one")
parser.add_argument("--spin-up", type=int, default=0, help="fine steps before a new melt is learnt from")
parser.add_argument("--to-the-bit", action="store_true", help="make the simulation reproducible")


def main(args):
    torch.manual_seed(0)
    dice = random.Random(6)
    melt = Melt(args.cells, args.grid, torch.Generator().manual_seed(6))
    advance = one_at_a_time()(melt.advance) if args.to_the_bit else melt.advance
    model = Stepper().to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    for step in range(1, args.steps + 1):  # the training loop
        if dice.random() < 1 / 14:
            melt.pour()
            advance(args.spin_up)
        before = melt.coarse()
        advance(args.ticks)
        guess = model(before.contiguous(memory_format=torch.channels_last))
        loss = F.mse_loss(guess, melt.coarse())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step}\t{loss.item():.2e}")


if __name__ == "__main__":
    main(parser.parse_args())
