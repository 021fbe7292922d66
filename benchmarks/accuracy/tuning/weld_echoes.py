"""Finds pores in pipeline welds from ultrasonic echoes (A-scans), prepared by loader workers."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, RandomSampler

LENGTH, PROBES = 512, 4


class Welds(Dataset):
    def __init__(self, count, despeckle):
        rng = np.random.default_rng(8)
        self.echo = rng.standard_normal((count, PROBES, LENGTH)).astype(np.float32)
        self.depth = rng.uniform(0.1, 0.9, count).astype(np.float32)
        self.pore = rng.integers(0, 2, count)
        at = (self.depth * LENGTH).astype(int)
        for n in np.flatnonzero(self.pore):
            self.echo[n, :, at[n] : at[n] + 8] += 3.0
        self.despeckle = despeckle
        self.window = np.hanning(17).astype(np.float32) / 8

    def __len__(self):
        return len(self.echo)

    def quieter(self, echo):
        """Shifts the scan at random, smooths it and keeps what is common to both, several times over."""
        for _ in range(self.despeckle):
            shifted = np.roll(echo, np.random.randint(-2, 3), 1)
            smooth = np.stack([np.convolve(line, self.window, "same") for line in shifted])
            echo = np.where(np.abs(smooth) > 0.05, 0.7 * echo + 0.3 * smooth, echo)
        return echo

    def __getitem__(self, n):
        echo = self.echo[n]
        if self.despeckle:
            echo = self.quieter(echo)
        gain = 1 + 0.1 * np.random.standard_normal()
        return (echo * gain).astype(np.float32), self.pore[n], self.depth[n]


class Stage(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(width, width, 5, padding=2, groups=4),
            nn.GroupNorm(4, width),
            nn.SiLU(),
            nn.Conv1d(width, width, 1),
        )

    def forward(self, x):
        return x + self.body(x)


class Inspector(nn.Module):
    def __init__(self, width=48, stages=6, lean=0):
        super().__init__()
        self.lean = lean
        self.stem = nn.Conv1d(PROBES, width, 8, stride=4, padding=2)
        self.stages = nn.ModuleList(Stage(width) for _ in range(stages))
        self.head = nn.Linear(width, 3)

    def forward(self, echo):
        x = self.stem(echo)
        for number, stage in enumerate(self.stages):
            if number < self.lean:
                x = checkpoint(stage, x, use_reentrant=False)
            else:
                x = stage(x)
        return self.head(x.amax(2)).split([2, 1], 1)


def forever(loader):
    while True:
        yield from loader


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--despeckle", type=int, default=0, help="passes of the filter against speckle")
    parser.add_argument(
        "--lean", type=int, default=0, help="stages that do not hold on to what is inside them"
    )
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    welds = Welds(3000, args.despeckle)
    loader = DataLoader(
        welds,
        batch_size=args.batch,
        sampler=RandomSampler(welds, num_samples=args.batch * args.steps, replacement=True),
        num_workers=args.workers,
        multiprocessing_context="fork" if args.workers else None,
        persistent_workers=args.workers > 0,
    )
    inspector = Inspector(lean=args.lean)
    optimizer = torch.optim.SGD(inspector.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=True)
    for step, (echo, pore, depth) in zip(range(args.steps), forever(loader)):  # the training loop
        kind, where = inspector(echo)
        off = (where.squeeze(1) - depth).abs() * pore
        loss = nn.functional.cross_entropy(kind, pore) + off.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 60 == 0:
            print(f"{step + 1} steps, loss {float(loss):.3f}")


if __name__ == "__main__":
    main()
