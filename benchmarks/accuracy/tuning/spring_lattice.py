"""Learns to step a lattice of masses that springs hold together, and to keep its energy."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

GRID = 10


def springs_of(grid):
    """all neighbours, also across corners"""
    found = []
    for row in range(grid):
        for column in range(grid):
            for down, right in ((0, 1), (1, 0), (1, 1), (1, -1)):
                if row + down < grid and 0 <= column + right < grid:
                    found.append((row * grid + column, (row + down) * grid + column + right))
    return found


class Lattice:
    def __init__(self, rng):
        self.springs = springs_of(GRID)
        self.ends = np.zeros((GRID * GRID, len(self.springs)), np.float32)
        for number, (a, b) in enumerate(self.springs):
            self.ends[a, number], self.ends[b, number] = 1, -1
        self.stiff = rng.uniform(0.5, 1.5, len(self.springs)).astype(np.float32)

    def advance(self, height, speed, dt=0.05, substeps=10):
        for _ in range(substeps):
            slope = height @ self.ends
            length = np.sqrt(1 + slope * slope)
            speed = speed - dt * (self.stiff * (1 - 1 / length) * slope) @ self.ends.T
            height = height + dt * speed
        return height, speed


class Energy(nn.Module):
    """of a batch of states, per mass"""

    def __init__(self, lattice, apart=0):
        super().__init__()
        self.springs = lattice.springs[:apart]
        self.apart = len(self.springs)
        self.constants = lattice.stiff.tolist()
        self.register_buffer("ends", torch.from_numpy(lattice.ends[:, self.apart :].copy()))
        self.register_buffer("stiff", torch.from_numpy(lattice.stiff[self.apart :].copy()))

    def forward(self, state):
        height, speed = state.chunk(2, 1)
        total = 0.5 * speed.square().sum(1)
        if self.apart < len(self.constants):
            stretch = (1 + (height @ self.ends).square()).sqrt() - 1
            total = total + 0.5 * (stretch.square() @ self.stiff)
        if self.springs:
            masses = height.unbind(1)
            for (a, b), constant in zip(self.springs, self.constants):
                stretch = (1 + (masses[a] - masses[b]).square()).sqrt() - 1
                total = total + 0.5 * constant * stretch.square()
        return total / height.shape[1]


class Stepper(nn.Module):
    def __init__(self, size, width=320, depth=10, exact=0):
        super().__init__()
        self.first = nn.Linear(size, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, size)
        # what the late layers add is small, and rounding must not eat it
        for layer in self.layers[max(depth - exact, 0) :]:
            layer.double()

    def forward(self, state):
        x = F.silu(self.first(state))
        for layer in self.layers:
            x = x + F.silu(layer(x.to(layer.weight.dtype)))
        return state + self.last(x.float())


class Swing:
    """A factor that swings like a damped spring let go at step 0, and never goes below a half."""

    def __init__(self, pieces, period=400):
        self.pieces, self.period = pieces, period

    def __call__(self, step):
        x, v, h = 1.0, 0.0, 6.283 * step / self.period / self.pieces
        for _ in range(self.pieces):
            v -= h * (x + 0.3 * v)
            x += h * v
        return 0.5 + 0.5 * x * x


class Report:
    def __init__(self, every):
        self.every = every

    def after(self, step, loss):
        if (step + 1) % self.every == 0:
            print(f"step {step + 1}: {loss.item():.5f}")


class Trainer:
    def __init__(self, args, callbacks):
        rng = np.random.default_rng(args.seed)
        torch.manual_seed(args.seed)
        lattice = Lattice(rng)
        height, speed = rng.standard_normal((2, 4096, GRID * GRID), dtype=np.float32)
        self.now = torch.from_numpy(np.concatenate([height, speed], 1))
        self.then = torch.from_numpy(np.concatenate(lattice.advance(height, speed), 1).astype(np.float32))
        with torch.no_grad():
            self.truth = Energy(lattice)(self.then)
        self.energy = Energy(lattice, args.apart)
        self.model = Stepper(2 * GRID * GRID, exact=args.exact)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3, fused=True)
        if args.swing:
            self.schedule = LambdaLR(self.optimizer, Swing(args.swing))
        else:
            self.schedule = CosineAnnealingLR(self.optimizer, 10_000)
        self.batch, self.callbacks = args.batch, callbacks

    def one(self):
        rows = torch.randint(len(self.now), (self.batch,))
        guess = self.model(self.now[rows])
        loss = F.mse_loss(guess, self.then[rows])
        loss = loss + 0.1 * F.mse_loss(self.energy(guess), self.truth[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def run(self, steps):
        for step in range(steps):  # the training loop
            loss = self.one()
            for callback in self.callbacks:
                callback.after(step, loss)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--seed", type=int, default=29)
    numerics = parser.add_argument_group("numerics")
    numerics.add_argument(
        "--exact", type=int, default=0, metavar="LAYERS", help="late layers with more digits"
    )
    numerics.add_argument("--swing", type=int, default=0, metavar="PIECES", help="let the rate swing")
    numerics.add_argument("--apart", type=int, default=0, metavar="SPRINGS", help="sum their energy apart")
    return parser.parse_args()


if __name__ == "__main__":
    args = arguments()
    Trainer(args, [Report(50)]).run(args.steps)
