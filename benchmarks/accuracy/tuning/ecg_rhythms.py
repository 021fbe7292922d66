"""Names the rhythm of eight-lead ECG strips with a one-dimensional residual network."""

import argparse
import itertools
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

RHYTHMS = ("sinus", "flutter", "fibrillation", "bigeminy", "block")
LEADS, SAMPLES, HERTZ = 8, 480, 120


@dataclass(frozen=True)
class Config:
    steps: int = 200
    batch: int = 32
    records: int = 320
    rate: float = 1e-3
    segments: int = 0
    detrend: int = 0
    thresholds: int = 0


def synthesise(amount, seed=3):
    rng = np.random.default_rng(seed)
    rhythm = rng.integers(len(RHYTHMS), size=amount)
    clock = np.arange(SAMPLES) / HERTZ
    pace = 1.0 + 0.35 * rhythm + 0.1 * rng.standard_normal(amount)
    phase = (pace[:, None] * clock + rng.random((amount, 1))) % 1
    beat = np.exp(-(((phase - 0.3) / 0.03) ** 2)) + 0.3 * np.exp(-(((phase - 0.6) / 0.08) ** 2))
    gain = rng.uniform(0.4, 1.2, (amount, LEADS, 1))
    wander = 0.5 * np.sin(2 * np.pi * (0.2 * clock + rng.random((amount, LEADS, 1))))
    noise = 0.05 * rng.standard_normal((amount, LEADS, SAMPLES))
    return (gain * beat[:, None] + wander + noise).astype(np.float32), rhythm


def without_baseline(signal, rounds):
    """Peels the beats off until the wandering baseline is left, and subtracts that."""
    baseline = signal.copy()
    for turn in range(rounds):
        reach = 1 + turn % 60
        level = 0.5 * (baseline[:, : -2 * reach] + baseline[:, 2 * reach :])
        baseline[:, reach:-reach] = np.minimum(baseline[:, reach:-reach], level)
    return signal - baseline


class Strips(Dataset):
    def __init__(self, config, folder):
        self.folder, self.segments, self.detrend = folder, config.segments, config.detrend
        self.signals, self.rhythm = synthesise(config.records)
        if self.segments:
            for record, signal in enumerate(self.signals):
                for part, piece in enumerate(np.array_split(signal, self.segments, axis=1)):
                    np.ascontiguousarray(piece).tofile(self.path(record, part))
            self.signals = None

    def __len__(self):
        return len(self.rhythm)

    def path(self, record, part):
        return f"{self.folder}/{record:05d}_{part:03d}.f32"

    def read(self, record):
        if self.signals is not None:
            return self.signals[record]
        pieces = []
        for part in range(self.segments):
            with open(self.path(record, part), "rb") as file:
                pieces.append(np.frombuffer(file.read(), np.float32).reshape(LEADS, -1))
        return np.concatenate(pieces, axis=1)

    def __getitem__(self, record):
        signal = self.read(record)
        if self.detrend:
            signal = without_baseline(signal, self.detrend)
        return torch.from_numpy(signal), int(self.rhythm[record])


class Block(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.first = nn.Conv1d(before, after, 5, stride, padding=2, bias=False)
        self.first_norm = nn.BatchNorm1d(after)
        self.second = nn.Conv1d(after, after, 5, padding=2, bias=False)
        self.second_norm = nn.BatchNorm1d(after)
        self.skip = nn.Identity()
        if stride != 1 or before != after:
            self.skip = nn.Sequential(
                nn.Conv1d(before, after, 1, stride, bias=False), nn.BatchNorm1d(after)
            )

    def forward(self, x):
        inner = F.relu(self.first_norm(self.first(x)), inplace=True)
        return F.relu(self.second_norm(self.second(inner)) + self.skip(x))


def build_network():
    return nn.Sequential(
        nn.Conv1d(LEADS, 24, 7, 2, padding=3, bias=False),
        nn.BatchNorm1d(24),
        nn.ReLU(inplace=True),
        Block(24, 24, 1),
        Block(24, 48, 2),
        Block(48, 64, 2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(64, len(RHYTHMS)),
    )


def area_under_curve(scores, truth, amount):
    points = []
    for threshold in torch.linspace(0, 1, amount).tolist():
        called = scores >= threshold
        found = (called & truth).sum().item() / max(1, truth.sum().item())
        alarms = (called & ~truth).sum().item() / max(1, (~truth).sum().item())
        points.append((alarms, found))
    points.sort()
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))


def endless(loader):
    while True:
        yield from loader


def train(config, folder):
    strips = Strips(config, folder)
    loader = DataLoader(strips, batch_size=config.batch, shuffle=True, drop_last=True)
    network = build_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=config.rate, fused=True)
    areas = []
    for step, (signals, rhythm) in zip(
        range(1, config.steps + 1), endless(loader), strict=False
    ):  # the training loop
        logits = network(signals)
        loss = F.cross_entropy(logits, rhythm)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if config.thresholds:
            truth = F.one_hot(rhythm, len(RHYTHMS)).bool()
            areas.append(area_under_curve(logits.detach().softmax(1), truth, config.thresholds))
        if step % 50 == 0:
            area = f", area {np.mean(areas[-50:]):.3f}" if areas else ""
            print(f"step {step}: loss {loss.item():.4f}{area}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--segments", type=int, default=0, help="files that a record is stored in")
    parser.add_argument("--detrend", type=int, default=0, help="rounds of baseline removal")
    parser.add_argument("--thresholds", type=int, default=0, help="points of the ROC curve")
    config = Config(**vars(parser.parse_args()))
    torch.manual_seed(12)
    with tempfile.TemporaryDirectory() as folder:
        train(config, folder)


if __name__ == "__main__":
    main()
