"""Which whale is calling?  Hydrophone records come as a stream of compressed blocks."""

import argparse
import itertools
import os
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CLIPS, SAMPLES, FRAME, SPECIES = 64, 6400, 256, 9


@dataclass
class Options:
    steps: int
    extra_readers: int
    intervals: int


def record_blocks(count):
    """Blocks of int16 sound, packed the way the buoys send them."""
    rng = np.random.default_rng(11)
    t = np.arange(SAMPLES) / 4000
    blocks = []
    for _ in range(count):
        kind = rng.integers(0, SPECIES, CLIPS)
        pitch = 120 + 90 * kind[:, None] + rng.normal(0, 20, (CLIPS, 1))
        sound = np.sin(2 * np.pi * pitch * t * (1 + 0.1 * t)) * 40 + rng.normal(0, 6, (CLIPS, SAMPLES))
        blocks.append((zlib.compress(sound.astype(np.int16).tobytes(), 1), kind))
    return blocks


class Stream(IterableDataset):
    def __init__(self, blocks):
        self.blocks = blocks
        self.window = np.hanning(FRAME).astype(np.float32)

    def decode(self, rng):
        for packed, kind in itertools.cycle(self.blocks):
            sound = np.frombuffer(zlib.decompress(packed), np.int16).reshape(CLIPS, SAMPLES)
            sound = np.roll(sound, int(rng.integers(0, 400)), axis=1).astype(np.float32)
            sound *= rng.uniform(0.5, 1.5) / 40
            frames = sound.reshape(CLIPS, -1, FRAME) * self.window
            power = np.abs(np.fft.rfft(frames, axis=2)).astype(np.float32)
            yield torch.from_numpy(np.log1p(power).transpose(0, 2, 1).copy()), torch.from_numpy(kind)

    def __iter__(self):
        info = get_worker_info()
        rng = np.random.default_rng(info.id if info else 0)
        stream = self.decode(rng)
        if info is None:
            return stream
        return itertools.islice(stream, info.id, None, info.num_workers)  # to each reader its part


def whale_net():
    def layer(a, b, stride):
        return [
            nn.Conv1d(a, b, 5, stride=stride, padding=2, bias=False),
            nn.BatchNorm1d(b),
            nn.ReLU(inplace=True),
        ]

    return nn.Sequential(
        *layer(FRAME // 2 + 1, 112, 1),
        *layer(112, 112, 1),
        *layer(112, 112, 2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(112, SPECIES),
    )


def recall_interval(logits, kind, draws, rng):
    """The mean recall over species, with a bootstrapped interval."""
    guess, kind = logits.argmax(1).numpy(), kind.numpy()
    means = []
    for _ in range(draws):
        rows = rng.integers(0, len(kind), len(kind))
        g, k = guess[rows], kind[rows]
        hits = np.bincount(k[g == k], minlength=SPECIES)
        seen = np.bincount(k, minlength=SPECIES)
        means.append((hits[seen > 0] / seen[seen > 0]).mean())
    return np.percentile(means, [5, 50, 95])


def train(options):
    torch.manual_seed(11)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))  # one core is for the reader
    loader = DataLoader(Stream(record_blocks(20)), batch_size=None, num_workers=1 + options.extra_readers)
    net = whale_net()
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, fused=True)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.05)
    rng = np.random.default_rng(5)
    recall = None

    for step, (spectra, kind) in enumerate(itertools.islice(loader, options.steps)):  # the training loop
        logits = net(spectra)
        loss = criterion(logits, kind)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if options.intervals:
            now = recall_interval(logits.detach(), kind, options.intervals, rng)
            recall = now if recall is None else 0.9 * recall + 0.1 * now
        if step % 40 == 0:
            print(
                "step",
                step,
                "loss",
                round(loss.item(), 3),
                "" if recall is None else f"recall {recall.round(3)}",
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--extra-readers", type=int, default=0, help="readers besides the first")
    parser.add_argument(
        "--intervals", type=int, default=0, help="bootstrap draws for the recall's interval"
    )
    train(Options(**vars(parser.parse_args())))
