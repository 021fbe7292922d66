"""Quantiles of what stores will sell tomorrow, with averaged weights and a log."""

import argparse
import copy
import csv
import gc
import math
import tempfile
import time
from collections import deque
from pathlib import Path

import torch
from torch import nn

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
STORES, ITEMS, HISTORY = 40, 300, 56


class Demand(nn.Module):
    def __init__(self, width=448):
        super().__init__()
        self.store, self.item = nn.Embedding(STORES, 16), nn.Embedding(ITEMS, 16)
        self.inlet = nn.Linear(HISTORY + 32, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.outlet = nn.Linear(width, len(QUANTILES))

    def forward(self, stores, items, history):
        x = torch.relu(self.inlet(torch.cat([self.store(stores), self.item(items), history], 1)))
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + torch.relu(layer(norm(x)))
        return self.outlet(x)


def pinball(forecast, sold):
    total = 0.0
    for column, quantile in enumerate(QUANTILES):
        error = sold - forecast[:, column]
        total = total + torch.maximum(quantile * error, (quantile - 1) * error).mean()
    return total / len(QUANTILES)


def make_sales(amount):
    stores, items = torch.randint(STORES, (amount,)), torch.randint(ITEMS, (amount,))
    level = 1 + stores / STORES + items / ITEMS
    history = torch.log1p(torch.poisson(level[:, None].expand(-1, HISTORY)))
    return stores, items, history, torch.log1p(torch.poisson(level))


class SalesTrainer:
    def __init__(self, folder):
        self.folder = folder
        self.sales, self.held = make_sales(20000), make_sales(512)
        self.model = Demand()
        self.smooth = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.weights, self.averages = list(self.model.parameters()), list(self.smooth.parameters())
        self.recent, self.rows = deque(maxlen=200), []
        self.running = torch.zeros((), dtype=torch.float64)

    def set_rate(self, step):
        rate = 1e-3 * min(1.0, (step + 1) / 20) * (0.6 + 0.4 * math.cos(math.pi * (step % 500) / 500))
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def update(self):
        rows = torch.randint(len(self.sales[0]), (512,))
        stores, items, history, sold = (column[rows] for column in self.sales)
        loss = pinball(self.model(stores, items, history), sold)
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.averages, self.weights, 0.01)
        return loss.detach()

    @torch.no_grad()
    def review(self, step):
        *inputs, sold = self.held
        held = pinball(self.smooth(*inputs), sold).item()
        torch.save(self.smooth.state_dict(), self.folder / "demand.pt")
        with (self.folder / "log.csv").open("a", newline="") as file:
            csv.writer(file).writerows(self.rows)
        self.rows.clear()
        print(f"{step}: {self.running.item():.4f}, held out {held:.4f}, last {float(self.recent[-1]):.4f}")

    def fit(self, steps):
        gc.collect()
        gc.freeze()
        for step in range(steps):  # the training loop
            began = time.perf_counter()
            self.set_rate(step)
            loss = self.update()
            self.running += 0.02 * (loss.double() - self.running)
            self.recent.append(loss)
            self.rows.append((step, self.optimizer.param_groups[0]["lr"], time.perf_counter() - began))
            if step % 50 == 49:
                self.review(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(23)
    with tempfile.TemporaryDirectory() as folder:
        SalesTrainer(Path(folder)).fit(args.steps)


if __name__ == "__main__":
    main()
