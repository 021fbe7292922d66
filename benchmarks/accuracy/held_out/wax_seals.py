"""Sorts impressions of wax seals by the device on them: lion, eagle, cross, lily, ship, tower."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

DEVICES = ["lion", "eagle", "cross", "lily", "ship", "tower"]
SIDE = 32


class Impressions(IterableDataset):
    """Seals as they come from the press. All presses share one die and one sequence of chances."""

    def __init__(self, count, seed=1215):
        self.count = count
        rng = np.random.default_rng(seed)
        self.dies = rng.normal(size=(len(DEVICES), SIDE, SIDE)).astype(np.float32)
        for _ in range(3):
            self.dies = (self.dies + np.roll(self.dies, 1, 1) + np.roll(self.dies, 1, 2)) / 2
        y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j]
        self.rim = (np.hypot(y, x) < 0.95).astype(np.float32)
        self.seed = seed

    def press(self, rng):
        which = rng.integers(0, len(DEVICES), self.count)
        wax = rng.normal(0, 1.0, (self.count, SIDE, SIDE)).astype(np.float32)
        seals = (self.dies[which] * rng.uniform(0.5, 1.0, (self.count, 1, 1)) + wax) * self.rim
        return seals.astype(np.float32)[:, None], which

    def __iter__(self):
        info = get_worker_info()
        turn, presses = (info.id, info.num_workers) if info else (0, 1)
        rng = np.random.default_rng(self.seed)
        number = 0
        while True:
            seals, which = self.press(rng)
            if number % presses == turn:
                yield torch.from_numpy(seals), torch.from_numpy(which)
            number += 1


class Residual(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.first = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1)

    def forward(self, x):
        return x + self.second(torch.relu(self.norm(self.first(x))))


class SealNet(nn.Sequential):
    def __init__(self, wide=32):
        super().__init__(
            nn.Conv2d(1, wide, 4, stride=4),
            Residual(wide),
            Residual(wide),
            nn.Conv2d(wide, 2 * wide, 2, stride=2),
            Residual(2 * wide),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2 * wide, len(DEVICES)),
        )


def kappa(said, truth):
    table = np.zeros((len(DEVICES), len(DEVICES)))
    np.add.at(table, (truth, said), 1)
    table /= table.sum()
    chance = (table.sum(0) * table.sum(1)).sum()
    return (np.trace(table) - chance) / (1 - chance + 1e-9)


class Agreement:
    """Cohen's kappa of the seals just seen, with an interval from resampling."""

    def __init__(self, resamples):
        self.resamples = resamples
        self.rng = np.random.default_rng(0)
        self.interval = (0.0, 0.0)

    def __call__(self, scores, truth):
        said, truth = scores.argmax(1).numpy(), truth.numpy()
        values = []
        for _ in range(self.resamples):
            rows = self.rng.integers(0, len(truth), len(truth))
            values.append(kappa(said[rows], truth[rows]))
        self.interval = tuple(np.quantile(values, [0.05, 0.95]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seals", type=int, default=64)
    parser.add_argument("--presses", type=int, default=1, help="processes that make impressions")
    parser.add_argument("--resamples", type=int, default=0, help="resamples for the agreement's interval")
    cfg = parser.parse_args()

    torch.manual_seed(0)
    model = SealNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    agreement = Agreement(cfg.resamples)
    stream = DataLoader(
        Impressions(cfg.seals), batch_size=None, num_workers=cfg.presses, multiprocessing_context="fork"
    )
    for step, (seals, which) in enumerate(stream):  # the training loop
        scores = model(seals)
        loss = nn.functional.cross_entropy(scores, which)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if cfg.resamples:
            agreement(scores.detach(), which)
        if step % 50 == 0:
            low, high = agreement.interval
            print(f"{step:4d} loss {loss.item():.3f} kappa {low:.2f} to {high:.2f}")
        if step + 1 == cfg.steps:
            break
