"""Tells five rhythms apart in twelve-lead ECGs of ten seconds."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

LEADS, LENGTH, CLASSES = 12, 1000, 5
TAPE_RATE, TAPE_SECONDS = 250, 900
HALF = 25


@dataclass
class Config:
    steps: int = 200
    batch: int = 32
    records: int = 1600
    workers: int = 2
    lr: float = 1e-3
    repair: int = 0
    context: int = 0


def remove_wander(signal, passes):
    """Subtracts the baseline, found with a running median."""
    baseline = signal
    for _ in range(passes):
        padded = np.pad(baseline, ((0, 0), (HALF, HALF)), mode="edge")
        baseline = np.median(sliding_window_view(padded, 2 * HALF + 1, axis=1), axis=-1)
    return signal - baseline


class Recordings(Dataset):
    def __init__(self, config):
        rng = np.random.default_rng(11)
        self.repair, self.context = config.repair, config.context
        self.labels = rng.integers(0, CLASSES, config.records)
        self.signals = rng.standard_normal((config.records, LEADS, LENGTH), dtype=np.float32)
        self.signals[:, :2] += 0.3 * self.labels[:, None, None].astype(np.float32)
        self.loose = np.zeros(config.records, dtype=bool)
        self.loose[rng.choice(config.records, max(1, config.records // 320), replace=False)] = True
        self.tape = rng.standard_normal((TAPE_SECONDS * TAPE_RATE, LEADS), dtype=np.float32)

    def __len__(self):
        return len(self.signals)

    def surroundings(self, index):
        rows = self.context * TAPE_RATE
        start = index * 911 % (len(self.tape) - rows)
        return self.tape[start : start + rows]

    def __getitem__(self, index):
        signal = self.signals[index]
        if self.repair and self.loose[index]:
            signal = remove_wander(signal, self.repair)
        around = self.surroundings(index) if self.context else None
        return torch.from_numpy(signal), int(self.labels[index]), around


def collate(samples):
    signals, labels, around = zip(*samples, strict=False)
    return torch.stack(signals), torch.tensor(labels), around


class Stage(nn.Module):
    def __init__(self, inputs, outputs, kernel):
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm1d(outputs)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)), inplace=True)


def build_model():
    return nn.Sequential(
        Stage(LEADS, 32, 7),
        Stage(32, 64, 5),
        Stage(64, 128, 3),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(128, CLASSES),
    )


def endless(loader):
    while True:
        yield from loader


def report(step, losses, around):
    worst = losses.argmax().item()
    line = f"step {step}: loss {losses.mean().item():.3f}, worst {losses[worst].item():.3f}"
    if around[worst] is not None:
        line += f", noise around it {around[worst].std():.3f}"
    print(line)


def train(config):
    torch.manual_seed(5)
    torch.set_num_threads(1)
    loader = DataLoader(
        Recordings(config),
        batch_size=config.batch,
        shuffle=True,
        drop_last=True,
        num_workers=config.workers,
        persistent_workers=True,
        collate_fn=collate,
    )
    model = build_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.lr, fused=True)
    batches = endless(loader)
    for step in range(1, config.steps + 1):  # the training loop
        signals, labels, around = next(batches)
        losses = F.cross_entropy(model(signals), labels, reduction="none")
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        if step % 50 == 0:
            report(step, losses.detach(), around)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repair", type=int, default=0, help="passes, if an electrode was loose")
    parser.add_argument("--context", type=int, default=0, help="seconds of tape around a sample")
    args = parser.parse_args()
    train(Config(steps=args.steps, repair=args.repair, context=args.context))


if __name__ == "__main__":
    main()
