"""Trains the click-through model of the ad ranker: embedding tables, a cross network and an MLP."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SIZES = (800, 300, 120, 2400, 24, 7, 60, 900, 40, 12, 250, 500, 1500, 30, 180, 640, 2000, 90, 350, 1100)
AD = 0
DENSE = 8
HOURS = 8 * 7 * 24


@dataclass(frozen=True)
class Config:
    steps: int = 200
    rows: int = 120_000
    batch_size: int = 1024
    width: int = 16
    cross_layers: int = 2
    learning_rate: float = 1e-3
    max_norm: float = 1.0
    eval_every: int = 10
    eval_rows: int = 0
    ctr_hours: int = 0
    ema_decays: int = 0
    clip_blocks: int = 0
    campaigns: int = 0
    schedule_grid: int = 0
    seed: int = 11

    @classmethod
    def from_arguments(cls) -> Config:
        parser = argparse.ArgumentParser(description=__doc__)
        for field in dataclasses.fields(cls):
            name = "--" + field.name.replace("_", "-")
            parser.add_argument(name, type=type(field.default), default=field.default)
        return cls(**vars(parser.parse_args()))


@dataclass(frozen=True)
class Impressions:
    keys: Tensor
    dense: Tensor
    clicks: Tensor

    def __len__(self) -> int:
        return len(self.clicks)

    @classmethod
    def synthetic(cls, rows: int, effects: list[np.ndarray], generator: np.random.Generator) -> Impressions:
        keys = np.stack([(generator.random(rows) ** 2 * size).astype(np.int64) for size in SIZES], 1)
        dense = generator.standard_normal((rows, DENSE), dtype=np.float32)
        score = (
            sum(effect[column] for effect, column in zip(effects, keys.T, strict=False))
            + 0.5 * dense[:, 0]
            - 2.0
        )
        clicks = (generator.random(rows) < 1 / (1 + np.exp(-score))).astype(np.float32)
        return cls(torch.from_numpy(keys), torch.from_numpy(dense), torch.from_numpy(clicks))


class HourlyCounters:
    """Views and clicks of each ad in the past hours."""

    def __init__(self, generator: np.random.Generator) -> None:
        self.views = generator.poisson(40.0, (SIZES[AD], HOURS))
        self.clicks = generator.poisson(1.5, (SIZES[AD], HOURS))

    def rate(self, ad: int, hours: int) -> float:
        views, clicks = 50, 1
        for hour in range(min(hours, HOURS)):
            views += self.views[ad, -1 - hour]
            clicks += self.clicks[ad, -1 - hour]
        return clicks / views


class Pacing:
    """Throttles the campaigns that spend faster than planned."""

    def __init__(self, campaigns: int, seed: int) -> None:
        generator = random.Random(seed)
        self.budgets = [1.0 + 9.0 * generator.random() for _ in range(campaigns)]
        self.spent = [0.0] * campaigns
        self.throttle = [1.0] * campaigns

    def update(self, progress: float, portion: float) -> float:
        """Lets each campaign spend for a step, and returns the mean throttle."""
        for number, budget in enumerate(self.budgets):
            self.spent[number] += budget * portion * self.throttle[number] * 1.2
            if self.spent[number] > budget * progress:
                self.throttle[number] = max(0.05, self.throttle[number] * 0.97)
            else:
                self.throttle[number] = min(1.0, self.throttle[number] * 1.02)
        return sum(self.throttle) / len(self.throttle)


class Schedule:
    """Warm-up and cosine decay, scaled to a mean of one half."""

    def __init__(self, steps: int, grid: int) -> None:
        self.steps, self.grid = steps, grid

    def curve(self, at: float) -> float:
        return min(1.0, at / 0.1) * 0.5 * (1.0 + math.cos(math.pi * at))

    def __call__(self, step: int) -> float:
        rate = self.curve(min(1.0, (step + 1) / self.steps))
        if self.grid:
            mean = sum(self.curve((point + 0.5) / self.grid) for point in range(self.grid)) / self.grid
            rate *= 0.5 / mean
        return rate


class Ranker(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = len(SIZES) * config.width + DENSE
        self.tables = nn.ModuleList(nn.Embedding(size, config.width) for size in SIZES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        self.cross = nn.ModuleList(nn.Linear(width, width) for _ in range(config.cross_layers))
        self.deep = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU())
        self.head = nn.Linear(width + 128, 1)

    def forward(self, keys: Tensor, dense: Tensor) -> Tensor:
        columns = [table(column) for table, column in zip(self.tables, keys.unbind(1), strict=False)]
        start = x = torch.cat([*columns, dense], dim=1)
        for layer in self.cross:
            x = torch.addcmul(x, start, layer(x))
        return self.head(torch.cat([x, self.deep(start)], dim=1)).squeeze(1)


def area_under_curve(scores: Tensor, clicks: Tensor) -> float:
    ranks = torch.empty(len(scores))
    ranks[scores.argsort()] = torch.arange(1.0, len(scores) + 1)
    positive = clicks > 0.5
    hits = positive.sum()
    return float((ranks[positive].double().sum() - hits * (hits + 1) / 2) / (hits * (len(scores) - hits)))


class Trainer:
    def __init__(self, config: Config) -> None:
        self.config = config
        generator = np.random.default_rng(config.seed)
        effects = [0.3 * generator.standard_normal(size) for size in SIZES]
        self.train = Impressions.synthetic(config.rows, effects, generator)
        self.held_out = Impressions.synthetic(config.eval_rows, effects, generator)
        self.counters = HourlyCounters(generator) if config.ctr_hours else None
        self.pacing = Pacing(config.campaigns, config.seed) if config.campaigns else None
        self.model = Ranker(config)
        parts = (self.model.cross, self.model.deep, self.model.head)
        dense = [weight for part in parts for weight in part.parameters()]
        groups = [
            {"params": list(self.model.tables.parameters()), "weight_decay": 0.0},
            {"params": dense, "weight_decay": 1e-2},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)
        schedule = Schedule(config.steps, config.schedule_grid)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, schedule)
        self.averages = []
        for number in range(config.ema_decays):
            weights = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
            self.averages.append((1 - 10 ** -(1 + 3 * number / config.ema_decays), weights))

    def batches(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        size = self.config.batch_size
        while True:
            order = torch.randperm(len(self.train))
            for rows in order[: len(order) // size * size].split(size):
                yield self.batch(rows)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, dense = self.train.keys[rows], self.train.dense[rows]
        if self.counters:
            rates = [self.counters.rate(ad, self.config.ctr_hours) for ad in keys[:, AD].tolist()]
            dense[:, -1] = torch.tensor(rates, dtype=torch.float32)
        return keys, dense, self.train.clicks[rows]

    @torch.no_grad()
    def clip(self) -> None:
        if not self.config.clip_blocks:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
            return
        for parameter in self.model.parameters():
            for block in parameter.grad.chunk(self.config.clip_blocks):
                norm = block.norm()
                if norm > self.config.max_norm:
                    block.mul_(self.config.max_norm / norm)

    @torch.no_grad()
    def update_averages(self) -> None:
        for decay, weights in self.averages:
            for name, weight in self.model.named_parameters():
                weights[name] = decay * weights[name] + (1 - decay) * weight

    @torch.inference_mode()
    def evaluate(self) -> float:
        self.model.eval()
        parts = zip(self.held_out.keys.split(4096), self.held_out.dense.split(4096), strict=False)
        scores = torch.cat([self.model(keys, dense) for keys, dense in parts])
        self.model.train()
        return area_under_curve(scores, self.held_out.clicks)

    def train_step(self, step: int, keys: Tensor, dense: Tensor, clicks: Tensor) -> Tensor:
        loss = F.binary_cross_entropy_with_logits(self.model(keys, dense), clicks)
        if self.pacing:
            loss = loss * self.pacing.update(step / self.config.steps, 1 / self.config.steps)
        self.optimizer.zero_grad()
        loss.backward()
        self.clip()
        self.optimizer.step()
        self.scheduler.step()
        self.update_averages()
        return loss.detach()

    def fit(self) -> None:
        numbers = range(1, self.config.steps + 1)
        for step, (keys, dense, clicks) in zip(numbers, self.batches(), strict=False):  # the training loop
            loss = self.train_step(step, keys, dense, clicks)
            if self.config.eval_rows and step % self.config.eval_every == 0:
                print(f"step {step} held-out AUC {self.evaluate():.4f}")
            if step % 50 == 0:
                print(f"step {step} loss {loss.item():.4f}")


def main() -> None:
    config = Config.from_arguments()
    torch.manual_seed(config.seed)
    Trainer(config).fit()


if __name__ == "__main__":
    main()
