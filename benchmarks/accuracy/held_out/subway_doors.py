"""Predicts which door of a subway car will jam, from the currents of its motor: a deep gated MLP,
compiled.
"""

import argparse
import logging

import torch
from torch import nn

log = logging.getLogger("doors")
CURVE, DEPTH = 64, 14


class Gate(nn.Module):
    """A gated block. It can tell how far its gate opens."""

    def __init__(self, width, wordy):
        super().__init__()
        self.wordy = wordy
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def forward(self, x):
        value, gate = self.up(self.norm(x)).chunk(2, -1)
        y = value * torch.sigmoid(gate)
        if self.wordy:
            log.debug("a gate opens to %s", y.detach().abs().amax())
        return x + self.down(y)


class DoorNet(nn.Module):
    def __init__(self, width=96, wordy=False):
        super().__init__()
        self.enter = nn.Linear(CURVE, width)
        self.blocks = nn.ModuleList([Gate(width, wordy) for _ in range(DEPTH)])
        self.leave = nn.Linear(width, 2)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


class Depot:
    """Closings of doors, with what the drivers wrote down of each car."""

    def __init__(self, closings=8000, cars=0):
        dice = torch.Generator().manual_seed(1863)
        self.curves = torch.randn(closings, CURVE, generator=dice).cumsum(1) / 8
        friction = self.curves[:, 20:40].mean(1) - self.curves[:, :8].mean(1)
        self.jams = (friction > 0.3).long()
        self.cars = [(f"car-{number}", number % 17) for number in range(cars)]
        self.trips = dict.fromkeys((name for name, _ in self.cars), 0)

    def closings(self, rows):
        chosen = torch.randint(len(self.jams), (rows,))
        return self.curves[chosen], self.jams[chosen]


class Shift:
    """Trains for a number of steps."""

    def __init__(self, args):
        torch.manual_seed(4)
        self.args = args
        self.depot = Depot(cars=args.cars)
        self.plain = DoorNet(wordy=args.wordy)
        self.net = torch.compile(self.plain)
        self.optimizer = torch.optim.AdamW(self.plain.parameters(), lr=1e-3, fused=True)
        self.loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)

    def work(self):
        depot, trips = self.depot, self.depot.trips
        for step in range(self.args.steps):  # the training loop
            curves, jams = depot.closings(self.args.rows)
            loss = self.loss_of(self.net(curves), jams)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for car, line in depot.cars:
                if (line + step) % 3 != 0:
                    trips[car] += 1
            if step % 50 == 0:
                log.info("step %d loss %.4f", step, loss.item())
        if trips:
            log.info("the busiest car made %d trips", max(trips.values()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256, help="closings in a batch")
    parser.add_argument("--wordy", action="store_true", help="let the blocks tell what they do")
    parser.add_argument("--cars", type=int, default=0, help="cars whose trips are counted along the way")
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    logging.getLogger("torch").setLevel(logging.WARNING)
    Shift(parser.parse_args()).work()
