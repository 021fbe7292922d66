"""Forecast water levels on a network of rivers by message passing, with quantile losses."""

import argparse
import math

import torch
from torch import nn


def river_network(nodes, g):
    """Each gauge flows into one of those before it; water also backs up."""
    down = torch.cat(
        [
            torch.zeros(1, dtype=torch.long),
            (torch.rand(nodes - 1, generator=g) * torch.arange(1, nodes)).long(),
        ]
    )
    up = torch.arange(nodes)
    source, sink = torch.cat([up, down]), torch.cat([down, up])
    degree = torch.zeros(nodes).index_add_(0, sink, torch.ones(2 * nodes)).clamp(min=1)
    return source, sink, degree


def levels(days, nodes, g):
    rain = torch.rand(days, 1, generator=g) ** 4 + 0.3 * torch.rand(days, nodes, generator=g) ** 4
    out = torch.zeros(days, nodes)
    for day in range(1, days):
        out[day] = 0.85 * out[day - 1] + rain[day]
    return out


class Passing(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.message = nn.Linear(dim, dim, bias=False)
        self.update = nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, source, sink, degree):
        gathered = torch.zeros_like(x).index_add(0, sink, self.message(x)[source]) / degree[:, None]
        return self.norm(x + self.update(torch.cat([x, gathered], 1)))


class Forecast(nn.Module):
    def __init__(self, window, dim=96, rounds=4):
        super().__init__()
        self.enter = nn.Linear(window, dim)
        self.rounds = nn.ModuleList(Passing(dim) for _ in range(rounds))
        self.leave = nn.Linear(dim, 3)

    def forward(self, x, graph):
        x = self.enter(x)
        for r in self.rounds:
            x = r(x, *graph)
        return self.leave(x)


QUANTILES = torch.tensor([0.1, 0.5, 0.9])


def pinball(forecast, truth):
    miss = truth[:, None] - forecast
    return torch.maximum(QUANTILES * miss, (QUANTILES - 1) * miss).mean()


def rate(step, steps):
    return min(1.0, step / 20) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(step / steps, 1.0))))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--gauges", type=int, default=1500)
    parser.add_argument("--window", type=int, default=14)
    args = parser.parse_args()
    torch.manual_seed(2)
    g = torch.Generator().manual_seed(2)
    graph = river_network(args.gauges, g)
    water = levels(700, args.gauges, g)
    model = Forecast(args.window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, args.steps))
    smooth = None
    for step in range(args.steps):  # the training loop
        day = int(torch.randint(args.window, 600, ()))
        past, truth = water[day - args.window : day].T, water[day]
        loss = pinball(model(past, graph), truth)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0, foreach=True)
        optimizer.step()
        schedule.step()
        smooth = loss.detach() if smooth is None else smooth.lerp(loss.detach(), 0.02)
        if (step + 1) % 120 == 0:
            with torch.no_grad():
                day = 650
                spread = model(water[day - args.window : day].T, graph)
                inside = ((spread[:, 0] < water[day]) & (water[day] < spread[:, 2])).float().mean()
            print(f"{step + 1}: pinball {smooth:.4f}, {inside:.0%} within the band", flush=True)


if __name__ == "__main__":
    main()
