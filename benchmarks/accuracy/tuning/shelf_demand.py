"""Forecasts a week of sales for each article of a supermarket chain, as quantiles."""

import argparse
import multiprocessing
import random
import threading
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

SERIES, SIGNALS, DAYS, AHEAD, DRIVERS = 8000, 12, 56, 7, 96
QUANTILES = (0.1, 0.5, 0.9)


@dataclass(frozen=True)
class Config:
    steps: int
    rows: int
    lag: float
    refit: int
    micro: int
    find_nan: bool
    width: int = 32
    dilations: tuple[int, ...] = (1, 2, 4, 8, 1, 2, 4, 8)


class PriceServer:
    """Stands in for the price server of the head office, some milliseconds away."""

    def __init__(self, milliseconds):
        self.mine, theirs = multiprocessing.Pipe()
        threading.Thread(target=self.serve, args=(theirs, milliseconds / 1000), daemon=True).start()

    @staticmethod
    def serve(line, seconds):
        while True:
            try:
                articles = line.recv()
            except EOFError:
                return
            time.sleep(seconds)
            line.send([0.01 * (article % 30) for article in articles])

    def discounts(self, articles):
        self.mine.send(articles)
        return torch.tensor(self.mine.recv())


class Elasticity:
    """A robust linear model of what drives sales, as a baseline for the network."""

    def __init__(self):
        self.drivers = torch.randn(SERIES, DRIVERS)
        self.log_sales = self.drivers[:, :5].sum(1, keepdim=True) * 0.1 + 0.3 * torch.randn(SERIES, 1)
        self.beta = torch.zeros(DRIVERS, 1)
        self.ridge = torch.eye(DRIVERS)

    def refit(self, rounds):
        weights = torch.ones(SERIES, 1)
        for _ in range(rounds):
            scaled = self.drivers * weights
            gram = scaled.T @ self.drivers + self.ridge
            self.beta = torch.linalg.solve(gram, scaled.T @ self.log_sales)
            weights = 1 / (self.log_sales - self.drivers @ self.beta).abs().clamp(min=0.05)

    def baseline(self, rows):
        return self.drivers[rows] @ self.beta


class Block(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.first = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.first_norm = nn.GroupNorm(4, width)
        self.second = nn.Conv1d(width, width, 3, padding=dilation, dilation=dilation, bias=False)
        self.second_norm = nn.GroupNorm(4, width)

    def forward(self, x):
        y = F.gelu(self.first_norm(self.first(x)))
        return F.gelu(x + self.second_norm(self.second(y)))


def make_model(config):
    return nn.Sequential(
        nn.Conv1d(SIGNALS, config.width, 1),
        *[Block(config.width, dilation) for dilation in config.dilations],
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(4 * config.width, AHEAD * len(QUANTILES)),
        nn.Unflatten(1, (AHEAD, len(QUANTILES))),
    )


def make_series():
    past = torch.randn(SERIES, SIGNALS, DAYS)
    weekly = torch.sin(torch.arange(DAYS) * 2 * torch.pi / 7)
    past[:, 0] = past[:, 0] * 0.3 + weekly + torch.randn(SERIES, 1)
    return past, past[:, 0, -AHEAD:] * 0.8 + 0.1 * torch.randn(SERIES, AHEAD)


def draw(rows):
    while True:
        for part in torch.randperm(SERIES).split(rows):
            if len(part) == rows:
                yield part


def pinball(forecast, sales, levels):
    error = sales[..., None] - forecast
    return torch.maximum(levels * error, (levels - 1) * error).mean()


def train(config):
    past, future = make_series()
    elasticity = Elasticity()
    prices = PriceServer(config.lag) if config.lag else None
    model = make_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    levels = torch.tensor(QUANTILES)
    price_lists = random.Random(8)
    for step, rows in zip(range(config.steps), draw(config.rows), strict=False):  # the training loop
        x, y = past[rows], future[rows]
        if prices:
            x[:, 3] -= prices.discounts(rows.tolist())[:, None]
        if config.refit and price_lists.random() < 0.1:
            elasticity.refit(config.refit)
        y = y - elasticity.baseline(rows)
        optimizer.zero_grad()
        pieces = max(1, config.micro)
        total = 0.0
        for part, goal in zip(x.chunk(pieces), y.chunk(pieces), strict=False):
            loss = pinball(model(part), goal, levels) * (len(part) / len(x))
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: pinball loss {float(total):.4f}")


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=200)
    cli.add_argument("--rows", type=int, default=64)
    cli.add_argument("--lag", type=float, default=0, help="milliseconds to the price server")
    cli.add_argument("--refit", type=int, default=0, help="rounds of the robust fit")
    cli.add_argument("--micro", type=int, default=0, help="parts that a batch is trained in")
    cli.add_argument("--find-nan", action="store_true")
    config = Config(**vars(cli.parse_args()))
    torch.manual_seed(23)
    if config.find_nan:
        torch.autograd.set_detect_anomaly(True)
    train(config)


if __name__ == "__main__":
    main()
