"""Forecasts the next hour's load of all substations of a grid, with one process a core.

torchrun --nproc-per-node 2 substation_loads.py
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SUBSTATIONS = 48
LINES = 60
HISTORY = 24
HOURS = 9600


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width)
        )

    def forward(self, x):
        return x + self.body(x)


class Forecaster(nn.Module):
    def __init__(self, width=256, depth=2):
        super().__init__()
        self.entry = nn.Linear(SUBSTATIONS * HISTORY + 4, width)
        self.trunk = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.exit = nn.Linear(width, SUBSTATIONS)

    def forward(self, history, calendar):
        return self.exit(self.trunk(self.entry(torch.cat([history, calendar], 1))))


def make_grid():
    hours = torch.arange(HOURS, dtype=torch.float32)[:, None]
    day, week = hours * (2 * torch.pi / 24), hours * (2 * torch.pi / 168)
    phase, size = torch.rand(SUBSTATIONS) * 2, torch.rand(SUBSTATIONS) + 0.5
    loads = size * (1 + 0.4 * torch.sin(day + phase) + 0.2 * torch.sin(week + phase))
    loads += 0.05 * torch.randn(HOURS, SUBSTATIONS)
    return loads, torch.cat([day.sin(), day.cos(), week.sin(), week.cos()], 1)


class Trainer:
    def __init__(self, args, folder):
        self.args = args
        self.rank = dist.get_rank()
        self.step = 0
        self.journal = os.path.join(folder, f"forecasts_{self.rank}.csv")
        torch.manual_seed(100)
        self.loads, self.calendar = make_grid()
        self.windows = self.loads.unfold(0, HISTORY, 1)
        self.factors = 0.2 * torch.randn(args.outages, SUBSTATIONS, LINES)
        self.limits = 0.8 + torch.rand(LINES)
        self.model = DistributedDataParallel(Forecaster())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, fused=True)
        self.random = torch.Generator().manual_seed(500 + self.rank)

    def draw(self):
        first = torch.randint(HOURS - HISTORY, (self.args.rows,), generator=self.random)
        now = first + HISTORY
        return self.windows[first].flatten(1), self.calendar[now], self.loads[now]

    def overload(self, forecast):
        """What the lines would carry beyond their limits, with each of the outages."""
        flows = torch.matmul(forecast, self.factors)
        return (flows.abs() - self.limits).clamp(min=0).square().mean()

    def loss(self, forecast, actual):
        loss = nn.functional.smooth_l1_loss(forecast, actual)
        if self.args.outages and self.rank == 0:
            loss = loss + 0.02 * dist.get_world_size() * self.overload(forecast)
        return loss

    def write_down(self, forecast, actual):
        said = forecast.detach().flatten()[: self.args.journal].tolist()
        was = actual.flatten()[: self.args.journal].tolist()
        for cell, (ours, theirs) in enumerate(zip(said, was, strict=False)):
            row, substation = divmod(cell, SUBSTATIONS)
            with open(self.journal, "a") as out:
                out.write(f"{self.step},{row},{substation},{ours:.4f},{theirs:.4f},{ours - theirs:.4f}\n")

    def train_step(self):
        history, calendar, actual = self.draw()
        forecast = self.model(history, calendar)
        loss = self.loss(forecast, actual)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if self.args.journal:
            self.write_down(forecast, actual)
        return loss

    def run(self):
        while self.step < self.args.steps:  # the training loop
            loss = self.train_step()
            self.step += 1
            if self.rank == 0 and self.step % 50 == 0:
                print(f"{self.step:5d}  loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--outages", type=int, default=0, help="line outages of the overload penalty")
    parser.add_argument("--journal", type=int, default=0, help="forecasts to write down, per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        Trainer(args, folder).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
