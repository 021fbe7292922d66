"""Sorts pods of poppies by their seed counts over weeks, with an LSTM over packed sequences.

Weeks differ from pod to pod, and pods of like length come together, so that little is padded. One loader
process is enough for it. The garbage collector is told once that what exists will stay.
"""

import argparse
import gc

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

TRAITS, SORTS = 16, 7


class Pods(Dataset):
    def __init__(self, count):
        rng = np.random.default_rng(14)
        self.sorts = rng.integers(0, SORTS, count).tolist()
        slopes = rng.normal(size=(SORTS, TRAITS))
        self.weeks = []
        for sort, long in zip(self.sorts, rng.integers(16, 40, count), strict=True):
            growth = np.arange(long)[:, None] / 20 * slopes[sort] + rng.normal(0, 0.7, (long, TRAITS))
            self.weeks.append(torch.from_numpy(growth.astype(np.float32)))

    def __len__(self):
        return len(self.sorts)

    def __getitem__(self, number):
        return self.weeks[number], self.sorts[number]


class LikeLengths(Sampler):
    def __init__(self, pods, size, steps):
        self.order = sorted(range(len(pods)), key=lambda number: len(pods.weeks[number]))
        self.size, self.steps = size, steps

    def __len__(self):
        return self.steps

    def __iter__(self):
        starts = torch.randint(len(self.order) - self.size, (self.steps,)).tolist()
        for start in starts:
            yield self.order[start : start + self.size]


def together(items):
    weeks, sorts = zip(*items, strict=True)
    return pack_sequence(weeks, enforce_sorted=False), torch.tensor(sorts)


class Botanist(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.LSTM(TRAITS, 128)
        self.judge = nn.Linear(128, SORTS)

    def forward(self, weeks):
        _, (last, _) = self.read(weeks)
        return self.judge(last[-1])


def train(steps):
    torch.manual_seed(14)
    pods = Pods(3000)
    loader = DataLoader(
        pods,
        batch_sampler=LikeLengths(pods, 64, steps),
        collate_fn=together,
        num_workers=1,
        prefetch_factor=4,
        multiprocessing_context="fork",
    )
    botanist = Botanist()
    optimizer = torch.optim.Adam(botanist.parameters(), lr=2e-3, fused=True)
    gc.collect()
    gc.freeze()
    losses = []
    for weeks, sorts in loader:  # the training loop
        loss = nn.functional.cross_entropy(botanist(weeks), sorts)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(botanist.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == 50:
            print(f"loss {torch.stack(losses).mean().item():.4f}")
            losses.clear()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    train(**vars(parser.parse_args()))
