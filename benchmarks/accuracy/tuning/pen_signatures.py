"""Tells writers apart by their signatures, from the path of the pen and a small picture of it."""

import argparse
from copy import deepcopy
from itertools import combinations, cycle, islice

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

WRITERS = 40
LONGEST = 128
SIDE = 24


class Signatures(Dataset):
    def __init__(self, amount, seed):
        rng = np.random.default_rng(seed)
        habits = rng.normal(size=(WRITERS, 2, 6))
        self.writers = rng.integers(0, WRITERS, amount).tolist()
        self.paths = []
        for writer in self.writers:
            times = np.linspace(0, 2 * np.pi, int(rng.integers(112, LONGEST + 1)))
            waves = np.sin(np.outer(np.arange(1, 7), times) + rng.normal(0, 0.15, (6, 1)))
            path = habits[writer] @ waves
            low, high = path.min(1, keepdims=True), path.max(1, keepdims=True)
            self.paths.append((0.999 * (path - low) / (high - low)).T.astype(np.float32))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.paths[index], self.writers[index]


def stamp(paths):
    """Counts the points in each cell, for all paths at once."""
    cells = (np.concatenate(paths) * SIDE).astype(np.int64)
    rows = np.repeat(np.arange(len(paths)), [len(path) for path in paths])
    places = (rows * SIDE + cells[:, 1]) * SIDE + cells[:, 0]
    ink = np.bincount(places, minlength=len(paths) * SIDE * SIDE).reshape(-1, SIDE, SIDE)
    return np.minimum(ink / 4, 1).astype(np.float32)


def draw(path, dots):
    """Follows the path with a pen of so many dots."""
    picture = np.zeros((SIDE, SIDE), np.float32)
    for place in np.linspace(0, len(path) - 1, dots):
        before = int(place)
        after = min(before + 1, len(path) - 1)
        share = place - before
        x, y = (1 - share) * path[before] + share * path[after]
        picture[int(y * SIDE), int(x * SIDE)] += len(path) / (4 * dots)
    return np.minimum(picture, 1)


class Batcher:
    def __init__(self, dots):
        self.dots = dots

    def __call__(self, samples):
        paths, writers = zip(*samples, strict=False)
        pen = np.zeros((len(paths), 3, LONGEST), np.float32)
        for row, path in enumerate(paths):
            pen[row, :2, : len(path)] = path.T
            pen[row, 2, : len(path)] = 1
        pictures = np.stack([draw(path, self.dots) for path in paths]) if self.dots else stamp(paths)
        return torch.from_numpy(pen), torch.from_numpy(pictures).unsqueeze(1), torch.tensor(writers)


class Turn(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv1d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm1d(width),
        )

    def forward(self, x):
        return F.relu(x + self.inner(x))


class SignatureNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(3, width, 5, padding=2, bias=False), nn.BatchNorm1d(width), nn.ReLU()
        )
        self.turns = nn.Sequential(Turn(width), Turn(width), Turn(width))
        self.look = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.top = nn.Sequential(nn.Linear(width + 32, 128), nn.ReLU(), nn.Linear(128, WRITERS))

    def forward(self, pen, pictures):
        there = pen[:, 2:]
        trail = (self.turns(self.stem(pen)) * there).sum(2) / there.sum(2)
        return self.top(torch.cat([trail, self.look(pictures)], 1))


class Averages:
    """Averages of the weights over several horizons, to choose from at the end."""

    def __init__(self, model, amount):
        self.decays = [1 - 2 ** -(1 + 8 * number / amount) for number in range(amount)]
        self.models = [deepcopy(model) for _ in range(amount)]

    @torch.no_grad()
    def update(self, model):
        for decay, average in zip(self.decays, self.models, strict=False):
            old, mixed = average.state_dict(), {}
            for name, value in model.state_dict().items():
                if value.is_floating_point():
                    mixed[name] = decay * old[name] + (1 - decay) * value
                else:
                    mixed[name] = value
            average.load_state_dict(mixed)


def warped(one, other):
    """The distance of two paths by dynamic time warping."""
    above = [0.0] + [float("inf")] * len(other)
    for x, y in one:
        row = [float("inf")]
        for place, (u, v) in enumerate(other):
            cost = abs(x - u) + abs(y - v)
            row.append(cost + min(above[place], above[place + 1], row[place]))
        above = row
    return above[-1]


def emphasis(pen, writers, pairs):
    """Gives more weight to signatures that look like those of somebody else."""
    paths = pen[:, :2, ::4].transpose(1, 2).tolist()
    names = writers.tolist()
    weights = [1.0] * len(paths)
    for one, other in islice(cycle(combinations(range(len(paths)), 2)), pairs):
        if names[one] != names[other] and warped(paths[one], paths[other]) < 6:
            weights[one] = weights[other] = 2.0
    return torch.tensor(weights)


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--dots", type=int, default=0, help="dots that a picture is drawn with")
    parser.add_argument("--lookalikes", type=int, default=0, help="pairs of a batch that are compared")
    parser.add_argument("--horizons", type=int, default=0, help="averages of the weights")
    args = parser.parse_args()

    torch.manual_seed(17)
    loader = DataLoader(
        Signatures(4096, 17),
        batch_size=32,
        shuffle=True,
        drop_last=True,
        collate_fn=Batcher(args.dots),
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
    )
    model = SignatureNet()
    averages = Averages(model, args.horizons) if args.horizons else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.02, fused=True)

    batches = islice(forever(loader), args.steps)
    for step, (pen, pictures, writers) in enumerate(batches, 1):  # the training loop
        losses = F.cross_entropy(model(pen, pictures), writers, reduction="none")
        if args.lookalikes:
            losses = losses * emphasis(pen, writers, args.lookalikes)
        loss = losses.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if averages:
            averages.update(model)
        if step % 50 == 0:
            print(f"{step:5} loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
