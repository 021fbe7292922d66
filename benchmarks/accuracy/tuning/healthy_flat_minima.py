"""Tells signal from background in collider events, which lie in one flat file.

Sharpness-aware minimization: each step climbs to the worst weights nearby, takes the gradient there, on the
same batch, and applies it to the weights it came from. Every eighth batch is for the temperature of the
outputs only.
"""

import argparse
import os
import tempfile
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as criterion
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

EVENTS, FEATURES = 60_000, 48


def simulate(path, seed=6):
    dice = np.random.default_rng(seed)
    table = np.memmap(path, np.float32, "w+", shape=(EVENTS, FEATURES + 1))
    direction = dice.normal(size=FEATURES).astype(np.float32) / FEATURES**0.5
    for start in range(0, EVENTS, 10_000):
        part = dice.standard_normal((10_000, FEATURES), dtype=np.float32)
        table[start : start + 10_000, :-1] = part
        table[start : start + 10_000, -1] = part @ direction > 0
    table.flush()


class Events(Dataset):
    """A batch is one gather from the mapped file."""

    def __init__(self, path):
        self.table = np.memmap(path, np.float32, "r").reshape(-1, FEATURES + 1)

    def __len__(self):
        return len(self.table)

    def __getitem__(self, rows):
        batch = torch.from_numpy(self.table[np.sort(rows)])
        return batch[:, :-1], batch[:, -1]


def batches(events, size):
    draw = BatchSampler(RandomSampler(events), size, drop_last=True)
    return DataLoader(events, sampler=draw, batch_size=None)


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, 1),
        )
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.body(x).squeeze(1)

    def calibrated(self, x):
        with torch.no_grad():
            logits = self.body(x).squeeze(1)
        return logits * torch.exp(-self.log_temperature)


class SharpnessAware:
    """Wraps an optimizer. The climb takes a handful of kernels for all weights together."""

    def __init__(self, weights, optimizer, radius):
        self.weights, self.optimizer, self.radius = list(weights), optimizer, radius

    @contextmanager
    def at_the_worst_nearby(self):
        slopes = [weight.grad for weight in self.weights]
        steepness = torch.nn.utils.get_total_norm(slopes)
        with torch.no_grad():
            climb = torch._foreach_mul(slopes, self.radius / (steepness + 1e-12))
            torch._foreach_add_(self.weights, climb)
        self.optimizer.zero_grad()
        yield
        with torch.no_grad():
            torch._foreach_sub_(self.weights, climb)

    def step(self, model, x, y):
        loss = criterion(model(x), y)
        loss.backward()
        with self.at_the_worst_nearby():
            criterion(model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def epochs(loader):
    while True:
        yield from loader


def main(steps):
    torch.manual_seed(13)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "events.f32")
        simulate(path)
        stream = epochs(batches(Events(path), size=768))
        model = Tagger(width=320)
        trained = SharpnessAware(
            model.body.parameters(),
            torch.optim.SGD(model.body.parameters(), lr=0.05, momentum=0.9, fused=True),
            radius=0.05,
        )
        tuner = torch.optim.SGD([model.log_temperature], lr=0.01, fused=True)
        losses = torch.zeros(steps)
        for step in range(steps):  # the training loop
            x, y = next(stream)
            if step % 8 == 7:
                loss = criterion(model.calibrated(x), y)
                loss.backward()
                tuner.step()
                tuner.zero_grad()
                losses[step] = loss.detach()
            else:
                losses[step] = trained.step(model, x, y)
    print(f"loss {losses[:20].mean():.3f}, in the end {losses[-20:].mean():.3f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=251)
    main(cli.parse_args().steps)
