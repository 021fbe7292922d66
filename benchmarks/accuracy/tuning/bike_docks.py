"""Forecasts a day of departures at each dock of a bike sharing scheme from the three days before."""

import argparse
import gc
import math
from dataclasses import dataclass, field

import torch
from torch import nn

WINDOW, HORIZON, CHANNELS = 72, 24, 8


class City:
    def __init__(self, stations, days, neighbours):
        hours = 24 * days
        places = torch.rand(stations, 2)
        angle = torch.arange(hours) % 24 * (math.pi / 12)
        rush = 0.3 + torch.relu(torch.sin(angle - 1.8)) + 0.5 * torch.relu(torch.sin(2 * angle))
        trips = torch.poisson(6 * torch.rand(stations, 1) * rush)
        weather = torch.randn(3, hours).cumsum(dim=1) / 10
        free, whole = torch.rand(stations, hours), trips.mean(dim=0)
        columns = [trips / 6, free, *weather, angle.sin(), angle.cos(), whole]
        series = torch.stack([column.expand(stations, hours) for column in columns], dim=2)
        self.stations, self.neighbours = stations, neighbours
        self.windows = series.unfold(1, WINDOW, 1)
        self.ahead = trips.unfold(1, HORIZON, 1)
        self.cut, self.end = hours * 3 // 4, hours - WINDOW - HORIZON
        self.nearest = torch.cdist(places, places).argsort(dim=1)[:, 1:].tolist()
        self.departures = {}
        if neighbours:
            for station, row in enumerate(trips.tolist()):
                for hour, count in enumerate(row):
                    if count:
                        self.departures[station, hour] = count

    def around(self, station, start):
        near = self.nearest[station][: self.neighbours]
        return [
            sum(self.departures.get((other, hour), 0.0) for other in near) / len(near)
            for hour in range(start, start + WINDOW)
        ]

    def draw(self, rows, held=False):
        first, last = (self.cut, self.end) if held else (0, self.cut - WINDOW - HORIZON)
        stations = torch.randint(self.stations, (rows,))
        starts = torch.randint(first, last, (rows,))
        x = self.windows[stations, starts]
        if self.neighbours:
            pairs = zip(stations.tolist(), starts.tolist(), strict=False)
            x[:, -1] = torch.tensor([self.around(station, start) for station, start in pairs])
        return x, self.ahead[stations, starts + WINDOW]


class DemandNet(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        layers, into = [], CHANNELS
        for dilation in (1, 2, 4, 8):
            layers += [
                nn.Conv1d(into, width, 3, padding=dilation, dilation=dilation, bias=False),
                nn.BatchNorm1d(width),
                nn.ReLU(),
            ]
            into = width
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(2 * width, HORIZON)

    def forward(self, x):
        h = self.body(x)
        return self.head(torch.cat([h.mean(dim=2), h[:, :, -1]], dim=1))


@dataclass
class Run:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    steps: int
    step: int = 0
    epoch_steps: int = 50
    loss: torch.Tensor | None = None
    errors: list = field(default_factory=list)

    def update(self, x, y):
        self.loss = nn.functional.poisson_nll_loss(self.model(x), y)
        self.optimizer.zero_grad()
        self.loss.backward()
        self.optimizer.step()
        self.step += 1


class Callback:
    def on_step_end(self, run):
        pass


class Progress(Callback):
    def on_step_end(self, run):
        if run.step % run.epoch_steps == 0:
            best = f", best held-out error {min(run.errors):.3f}" if run.errors else ""
            print(f"step {run.step}: loss {run.loss.item():.3f}{best}")


class HeldOutWeeks(Callback):
    def __init__(self, city, windows, every=4):
        self.x, self.y = city.draw(windows, held=True)
        self.every = every

    @torch.no_grad()
    def on_step_end(self, run):
        if run.step % self.every:
            return
        run.model.eval()
        total = 0.0
        for x, y in zip(self.x.split(160), self.y.split(160), strict=False):
            total += (run.model(x).exp() - y).abs().sum().item()
        run.errors.append(total / self.y.numel())
        run.model.train()


class MemoryGuard(Callback):
    def __init__(self, sweeps):
        self.sweeps, self.due = sweeps, 0.0

    def on_step_end(self, run):
        self.due += self.sweeps / run.epoch_steps
        while self.due >= 1.0:
            self.due -= 1.0
            gc.collect()


def fit(run, city, callbacks, rows):
    while run.step < run.steps:  # the training loop
        run.update(*city.draw(rows))
        for callback in callbacks:
            callback.on_step_end(run)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=40)
    parser.add_argument("--neighbours", type=int, default=0, help="nearest stations that count as around")
    parser.add_argument("--held-windows", type=int, default=0, help="windows of the weeks held out")
    parser.add_argument("--sweeps", type=int, default=0, help="sweeps of the memory guard in an epoch")
    args = parser.parse_args()
    torch.manual_seed(23)

    city = City(stations=160, days=48, neighbours=args.neighbours)
    model = DemandNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    callbacks = []
    if args.held_windows:
        callbacks.append(HeldOutWeeks(city, args.held_windows))
    if args.sweeps:
        callbacks.append(MemoryGuard(args.sweeps))
    callbacks.append(Progress())
    fit(Run(model, optimizer, args.steps), city, callbacks, args.rows)


if __name__ == "__main__":
    main()
