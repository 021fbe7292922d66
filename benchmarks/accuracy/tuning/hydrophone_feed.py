#!/usr/bin/env python3
# What passes by? Third-octave counts of two hydrophones come as lines of text, one hydrophone after the other;
# a perceptron tells ferries from tugs, dolphins, rain and so on.
import argparse
import itertools
import zlib

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

BANDS = 64
KINDS = ("ferry", "tug", "sail", "dolphin", "seal", "rain", "ice", "nothing")


def write_lines(count, rng):
    kinds = rng.integers(0, len(KINDS), count)
    shapes = rng.gamma(2.0, 40.0, (len(KINDS), BANDS))
    counts = rng.poisson(20 + shapes[kinds])
    lines = []
    for number, (row, kind) in enumerate(zip(counts.tolist(), kinds.tolist())):
        text = f"{number};{kind};" + ";".join(map(str, row))
        lines.append(f"{text}*{zlib.crc32(text.encode()):08x}")
    return lines


def parse(lines):
    bands = np.empty((len(lines), BANDS), np.float32)
    kinds = np.empty(len(lines), np.int64)
    for row, line in enumerate(lines):
        text, check = line.split("*")
        if zlib.crc32(text.encode()) != int(check, 16):
            raise ValueError(f"garbled: {line}")
        _, kind, *counts = text.split(";")
        bands[row] = list(map(float, counts))
        kinds[row] = int(kind)
    return np.log1p(bands) - 4, kinds


def despike(bands):
    """The first logger of the pair is an old one, with spikes between neighbours."""
    middle = (np.roll(bands, 1, 1) + np.roll(bands, -1, 1)) / 2
    off = np.abs(bands - middle)
    return np.where(off > 4 * np.median(off, 1, keepdims=True), middle, bands)


class Feed(IterableDataset):
    def __init__(self, lines, size, rounds):
        self.lines, self.size, self.rounds = lines, size, rounds

    def blocks(self):
        for number in itertools.count():
            first = number * self.size % len(self.lines)
            yield number, *parse(self.lines[first : first + self.size])

    def __iter__(self):
        info = get_worker_info()
        mine, all_of_us = (info.id, info.num_workers) if info else (0, 1)
        for number, bands, kinds in itertools.islice(self.blocks(), mine, None, all_of_us):
            if number % 2 == 0:
                for _ in range(self.rounds):
                    bands = despike(bands)
            yield torch.from_numpy(bands), torch.from_numpy(kinds)


def build(width):
    return nn.Sequential(
        nn.Linear(BANDS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, len(KINDS)),
    )


def run(steps, size, width, workers, rounds):
    torch.manual_seed(8)
    lines = write_lines(min(steps, 220) * size, np.random.default_rng(8))
    loader = DataLoader(
        Feed(lines, size, rounds),
        batch_size=None,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    net = build(width)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
    step = 0
    for bands, kinds in itertools.islice(loader, steps):  # the training loop
        optimizer.zero_grad()
        loss = loss_of(net(bands), kinds)
        loss.backward()
        optimizer.step()
        step += 1
        if step % 64 == 0:
            print(step, round(loss.item(), 3))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--size", type=int, default=256, help="lines in a batch")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=0, help="rounds of despiking, for the old logger")
    run(**vars(parser.parse_args()))
