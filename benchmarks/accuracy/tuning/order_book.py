"""Forecasts whether the price goes down, stays or goes up in the next minute, from the order book."""

import argparse
import gc
import itertools
import math
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    steps: int = 200
    sweep_rate: float = 0.0
    vol_history: int = 0
    watch: int = 0
    rows: int = 256
    levels: int = 40
    window: int = 32
    width: int = 512
    lr: float = 4e-4
    seed: int = 19


@dataclass(slots=True)
class Trade:
    minute: int
    price: float
    size: int
    buyer: bool


def record_session(rng, minutes=6000, per_minute=10):
    tape, price = [], 100.0
    for number in range(minutes * per_minute):
        price += rng.gauss(0.0, 0.01)
        tape.append(Trade(number // per_minute, price, rng.randrange(1, 50), rng.random() < 0.5))
    return tape


def make_windows(tape, cfg):
    """Returns the book's windows, and what the price does after each."""
    closes = torch.tensor([after.price for after in tape[9::10]])
    minutes = torch.tensor([trade.minute for trade in tape])
    signed = torch.tensor([float(trade.size if trade.buyer else -trade.size) for trade in tape])
    flow = torch.zeros(len(closes)).index_add_(0, minutes, signed)
    book = torch.randn(len(closes), cfg.levels)
    book[:, 0] = flow / flow.std()
    moves = closes.diff()[cfg.window - 1 :]
    labels = torch.bucketize(moves, torch.tensor([-0.01, 0.01]))
    return book.unfold(0, cfg.window, 1)[: len(labels)], labels


class BookNet(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        sizes = [cfg.levels * cfg.window, cfg.width, cfg.width, cfg.width]
        layers = [nn.Flatten()]
        for inputs, outputs in itertools.pairwise(sizes):
            layers += [nn.Linear(inputs, outputs), nn.LayerNorm(outputs), nn.GELU()]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(cfg.width, 3)

    def forward(self, windows):
        return self.head(self.body(windows))


def make_optimizer(model, cfg):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=cfg.lr, fused=True)


def make_schedule(optimizer, cfg, rng):
    """Warms up, goes down along a cosine, and is careful where the market is volatile."""
    volatility = [0.5 + rng.random() for _ in range(cfg.vol_history)]

    def scale(step):
        base = min(1.0, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / cfg.steps)))
        if not volatility:
            return base
        now = step * 5 % len(volatility)
        weight = total = 0.0
        for minute, value in enumerate(volatility):
            near = math.exp(-(((minute - now) / 90.0) ** 2))
            weight += near
            total += near * value
        return base * weight / total

    return torch.optim.lr_scheduler.LambdaLR(optimizer, scale)


def watch(layer, units, activity):
    for unit in range(units):

        def note(module, inputs, output, unit=unit):
            activity[unit] = output[:, unit % output.shape[1]].detach().mean()

        layer.register_forward_hook(note)


def train(cfg):
    rng = random.Random(cfg.seed)
    torch.manual_seed(cfg.seed)
    tape = record_session(rng)
    windows, labels = make_windows(tape, cfg)
    model = BookNet(cfg)
    optimizer = make_optimizer(model, cfg)
    schedule = make_schedule(optimizer, cfg, rng)
    activity, due, step = {}, 0.0, 0
    while step < cfg.steps:  # the training loop
        step += 1
        if cfg.watch:
            watch(model.body, cfg.watch, activity)
        rows = torch.randint(len(labels), (cfg.rows,))
        loss = F.cross_entropy(model(windows[rows]), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        due += cfg.sweep_rate
        while due >= 1.0:
            gc.collect()
            due -= 1.0
        if step % 50 == 0:
            active = sum(value.item() > 0 for value in activity.values())
            print(f"step {step} loss {loss.item():.4f} active {active}/{len(activity)}")
    print(f"trained on {len(tape)} trades, the last at {tape[-1].price:.2f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sweep-rate", type=float, default=Config.sweep_rate, help="sweeps per step")
    parser.add_argument("--vol-history", type=int, default=Config.vol_history, help="minutes of volatility")
    parser.add_argument("--watch", type=int, default=Config.watch, help="units whose activity is noted")
    train(Config(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
