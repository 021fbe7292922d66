"""Grows a rose window from one cell: a neural cellular automaton, trained on a pool of its own states."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

SIDE, CHANNELS = 24, 16
SPAN = torch.linspace(-1.0, 1.0, SIDE)
YY, XX = torch.meshgrid(SPAN, SPAN, indexing="ij")


def rosette():
    """Draws what shall grow: six petals of glass, as red, green, blue and cover."""
    radius, angle = torch.hypot(XX, YY), torch.atan2(YY, XX)
    cover = (radius < 0.65 + 0.2 * torch.cos(6 * angle)).float()
    red = 0.5 + 0.5 * torch.cos(3 * angle)
    blue = 0.5 + 0.5 * torch.sin(12 * radius)
    return torch.stack([cover * red, cover * radius.clamp(max=1.0), cover * blue, cover])


def single_cell():
    grid = torch.zeros(CHANNELS, SIDE, SIDE)
    grid[3:, SIDE // 2, SIDE // 2] = 1.0
    return grid


def holes(amount):
    """Returns masks that are 0 in a disc somewhere."""
    x, y = torch.rand(2, amount, 1, 1) - 0.5
    radius = 0.1 + 0.3 * torch.rand(amount, 1, 1)
    return ((XX - x) ** 2 + (YY - y) ** 2 > radius**2).float()[:, None]


def alive(grid):
    """Cells that have cover, or a neighbour that has."""
    return F.max_pool2d(grid[:, 3:4].detach(), 3, stride=1, padding=1) > 0.1


class Automaton(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.sense = nn.Conv2d(CHANNELS, hidden, 3, padding=1)
        self.change = nn.Conv2d(hidden, CHANNELS, 1, bias=False)
        nn.init.normal_(self.change.weight, std=1e-3)

    def turn(self, grid):
        before = alive(grid)
        awake = torch.rand(len(grid), 1, SIDE, SIDE) < 0.5
        grid = grid + self.change(F.relu(self.sense(grid))) * awake
        return grid * (before & alive(grid))

    def forward(self, grid, turns):
        for _ in range(turns):
            grid = self.turn(grid)
        return grid


class Pool:
    """States to go on from. Of each draw, the worst starts again and the two best are damaged."""

    def __init__(self, amount, target):
        self.target, self.seed = target, single_cell()
        self.grids = self.seed.repeat(amount, 1, 1, 1)

    def draw(self, amount):
        rows = torch.randperm(len(self.grids))[:amount]
        errors = (self.grids[rows, :4] - self.target).square().mean((1, 2, 3))
        rows = rows[errors.argsort(descending=True)]
        grids = self.grids[rows]
        grids[0] = self.seed
        grids[-2:] *= holes(2)
        return rows, grids

    def put_back(self, rows, grids):
        self.grids[rows] = grids.detach().clamp(-4.0, 4.0)


def train(model, target, steps, batch=8, turns=8):
    """Trains, and yields now and then how far it is."""
    pool = Pool(256, target)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=150, gamma=0.3)
    for step in range(1, steps + 1):  # the training loop
        rows, start = pool.draw(batch)
        grown = model(start, turns)
        loss = F.mse_loss(grown[:, :4], target.expand(batch, -1, -1, -1))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        pool.put_back(rows, grown)
        if step % 50 == 0:
            yield step, loss.item()


@torch.no_grad()
def show(model, turns=48):
    cover = model(single_cell()[None], turns)[0, 3]
    for row in cover[::2].tolist():
        print("".join("#" if value > 0.5 else "." for value in row))


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=200)
    cli.add_argument("--hidden", type=int, default=48)
    args = cli.parse_args()
    torch.manual_seed(24)
    model = Automaton(args.hidden)
    for step, loss in train(model, rosette(), args.steps):
        print(f"step {step} loss {loss:.4f}")
    show(model)


if __name__ == "__main__":
    main()
