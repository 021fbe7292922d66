#!/usr/bin/env python
"""Tells black truffles from cheaper ones by the signals of an electronic nose.

usage: truffle_aroma.py [--steps N] [--sniffs N] [--guard N] [--stacks N]
"""

import argparse
import collections
import pathlib
import sys
import tempfile
import threading
import time
import traceback
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

SENSORS, MOMENTS, KINDS = 8, 128, 5


class Nose(Dataset):
    """One truffle is one item: the mean of its sniffs, which lie packed in memory."""

    def __init__(self, truffles, sniffs):
        rng = np.random.default_rng(33)
        self.kinds = rng.integers(0, KINDS, truffles)
        rise = rng.uniform(0.02, 0.2, (KINDS, SENSORS, 1))
        shape = 1 - np.exp(-rise[self.kinds] * np.arange(MOMENTS))
        signals = shape + rng.normal(0, 0.2, (truffles, SENSORS, MOMENTS))
        self.signals = signals.astype(np.float32)
        self.sniffs = sniffs
        self.packed = [zlib.compress((s[:2] * 50).astype(np.int8).tobytes(), 1) for s in self.signals[:200]]

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, number):
        signal = self.signals[number]
        if self.sniffs:
            total = np.zeros((2, MOMENTS), np.float32)
            for sniff in range(self.sniffs):
                raw = zlib.decompress(self.packed[(number + sniff) % len(self.packed)])
                total += np.frombuffer(raw, np.int8).reshape(2, MOMENTS)
            signal = signal.copy()
            signal[:2] += total / (5000 * self.sniffs)
        return signal, self.kinds[number]


class Stacks(threading.Thread):
    """Notes so many times a second what each thread is at."""

    def __init__(self, often):
        super().__init__(daemon=True)
        self.often, self.seen = often, collections.Counter()

    def run(self):
        while True:
            time.sleep(1 / self.often)
            for frame in sys._current_frames().values():
                self.seen[";".join(f.name for f in traceback.extract_stack(frame))] += 1


def make_net():
    return nn.Sequential(
        nn.Conv1d(SENSORS, 96, 7, stride=2, padding=3),
        nn.LeakyReLU(0.1),
        nn.Conv1d(96, 128, 5, stride=2, padding=2),
        nn.LeakyReLU(0.1),
        nn.Conv1d(128, 128, 3, padding=1),
        nn.LeakyReLU(0.1),
        nn.Flatten(),
        nn.Linear(128 * MOMENTS // 4, 192),
        nn.LeakyReLU(0.1),
        nn.Linear(192, KINDS),
    )


def train(steps, sniffs, guard, stacks, folder):
    torch.manual_seed(33)
    nose = Nose(4000, sniffs)
    order = RandomSampler(nose, replacement=True, num_samples=steps * 48)
    loader = DataLoader(nose, batch_size=48, sampler=order)
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-4, fused=True)
    loss_of = nn.CrossEntropyLoss()
    if stacks:
        Stacks(stacks).start()
    for step, (signals, kinds) in enumerate(loader, 1):  # the training loop
        loss = loss_of(net(signals), kinds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step * guard // 100 > (step - 1) * guard // 100:
            everything = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(everything, folder / "newest.pt")
        if step % 50 == 0:
            print("step", step, "loss", round(loss.item(), 4), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sniffs", type=int, default=0, help="packed sniffs of each truffle")
    parser.add_argument(
        "--guard", type=int, default=0, help="how often in 100 steps to guard against a crash"
    )
    parser.add_argument("--stacks", type=float, default=0, help="how often in a second to note the stacks")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        train(given.steps, given.sniffs, given.guard, given.stacks, pathlib.Path(place))
