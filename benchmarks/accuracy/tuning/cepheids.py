"""Sorts variable stars by the shape of their light curves."""

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, Subset

KINDS = ("eclipsing", "rr lyrae", "delta scuti", "rotation", "quiet")
BATCHES_PER_PASS = 100


def make_survey(stars, cadences, rng):
    time = np.linspace(0, 27, cadences, dtype=np.float32)
    period = rng.uniform(0.6, 6, (stars, 1)).astype(np.float32)
    phase = 2 * math.pi * (time / period + rng.random((stars, 1), dtype=np.float32))
    shapes = np.stack(
        [
            -(np.abs(np.sin(phase)) ** 9),
            phase % (2 * math.pi) / math.pi - 1,
            np.sin(6 * phase),
            np.sin(phase),
            np.zeros_like(phase),
        ]
    )
    kind = rng.integers(0, len(KINDS), stars)
    flux = shapes[kind, np.arange(stars)] + 0.3 * rng.standard_normal((stars, cadences), dtype=np.float32)
    background = rng.standard_normal((stars, cadences), dtype=np.float32)
    longitude = rng.random(stars, dtype=np.float32)
    return np.stack([flux, background], 1).astype(np.float32), kind, longitude


class DustMap:
    """Reddening by galactic longitude, from an unordered table of sight lines."""

    def __init__(self, path):
        longitude, reddening = np.load(path)
        order = np.argsort(longitude, kind="stable")
        self.longitude, self.reddening = longitude[order], reddening[order]

    def at(self, longitude):
        found = np.searchsorted(self.longitude, longitude)
        return self.reddening[min(int(found), len(self.reddening) - 1)]


class LightCurves(Dataset):
    def __init__(self, flux, kind, longitude, dust):
        self.flux, self.kind, self.longitude = flux, kind, longitude
        self.dust_path, self.dust = dust, None

    def __len__(self):
        return len(self.kind)

    def __getitem__(self, star):
        if self.dust is None:
            self.dust = DustMap(self.dust_path)
        curve = np.roll(self.flux[star], int(torch.randint(self.flux.shape[-1], ())), axis=-1)
        curve[0] *= 1 + 0.4 * self.dust.at(self.longitude[star])
        return torch.from_numpy(curve), int(self.kind[star])


class Squeeze(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Sequential(
            nn.Linear(width, width // 4), nn.ReLU(), nn.Linear(width // 4, width), nn.Sigmoid()
        )

    def forward(self, x):
        return x * self.gate(x.mean(-1)).unsqueeze(-1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm1d(width)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm1d(width)
        self.squeeze = Squeeze(width)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.squeeze(self.norm2(self.conv2(h))))


class CurveNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv1d(2, width, 9, padding=4, bias=False), nn.BatchNorm1d(width), nn.ReLU()
        )
        self.fine = nn.Sequential(*[Block(width) for _ in range(4)])
        self.pool = nn.AvgPool1d(2)
        self.coarse = nn.Sequential(*[Block(width) for _ in range(4)])
        self.head = nn.Linear(width, len(KINDS))

    def forward(self, curves):
        return self.head(self.coarse(self.pool(self.fine(self.stem(curves)))).mean(-1))


class Trainer:
    def __init__(self, args, folder):
        rng = np.random.default_rng(17)
        self.args = args
        np.save(folder / "dust.npy", rng.random((2, 1_000_000), dtype=np.float32))
        self.survey = LightCurves(*make_survey(4000, 128, rng), folder / "dust.npy")
        self.model = CurveNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=args.steps)

    def loader(self, stars, batches, keep):
        sampler = RandomSampler(stars, replacement=True, num_samples=batches * self.args.batch)
        return DataLoader(
            stars, self.args.batch, sampler=sampler, num_workers=2, persistent_workers=keep, drop_last=True
        )

    def passes(self):
        fields = self.args.fields
        if not fields:
            whole = self.loader(self.survey, BATCHES_PER_PASS, keep=True)
            while True:
                yield whole
        sky = np.argsort(self.survey.longitude)
        while True:
            for field in np.array_split(sky, fields):
                stars = Subset(self.survey, field.tolist())
                yield self.loader(stars, max(1, BATCHES_PER_PASS // fields), keep=False)

    def train_batch(self, curves, kinds):
        loss = F.cross_entropy(self.model(curves), kinds, label_smoothing=0.05)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()

    def run(self):
        step = 0
        for loader in self.passes():
            for curves, kinds in loader:  # the training loop
                loss = self.train_batch(curves, kinds)
                step += 1
                if step % 50 == 0:
                    print(f"step {step}: loss {loss.item():.3f}")
                if step >= self.args.steps:
                    return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--fields", type=int, default=0, help="train on the sky in so many fields")
    parser.add_argument("--detect-anomaly", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(17)
    torch.autograd.set_detect_anomaly(args.detect_anomaly)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(args, Path(folder)).run()


if __name__ == "__main__":
    main()
