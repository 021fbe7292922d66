"""Tells the beat error of mechanical watches from a contact microphone.

Workers put each recording into a room of its own (echoes at random), so that no recording is heard
twice alike. Every calibre has a small gain of its own on the features.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SAMPLES = 1536


class Workshop(Dataset):
    def __init__(self, watches, calibres, echoes):
        rng = np.random.default_rng(28800)
        self.error = rng.uniform(-1, 1, watches).astype(np.float32)
        self.calibre = rng.integers(0, calibres, watches)
        self.ticks = rng.normal(0, 0.05, (watches, SAMPLES)).astype(np.float32)
        ring = np.exp(-np.arange(40) / 8) * np.cos(np.arange(40))
        for watch in range(watches):
            for beat in range(6):
                at = 60 + beat * 230 + (int(40 * self.error[watch]) if beat % 2 else 0)
                self.ticks[watch, at : at + 40] += ring
        self.echoes = echoes

    def __len__(self):
        return len(self.error)

    def __getitem__(self, watch):
        sound = self.ticks[watch] * np.float32(np.random.uniform(0.5, 2))
        for _ in range(self.echoes):
            wall = np.random.standard_normal(24).astype(np.float32) * np.float32(0.02)
            wall[0] = 1.0
            sound = np.convolve(sound, wall)[:SAMPLES]
        return torch.from_numpy(sound)[None], int(self.calibre[watch]), self.error[watch]


class Residual(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(channels, channels, 7, padding=3),
            nn.BatchNorm1d(channels),
            nn.ReLU(),
            nn.Conv1d(channels, channels, 7, padding=3),
            nn.BatchNorm1d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Listener(nn.Module):
    def __init__(self, calibres, channels=24):
        super().__init__()
        self.front = nn.Conv1d(1, channels, 15, stride=4, padding=7)
        self.body = nn.Sequential(Residual(channels), nn.AvgPool1d(2), Residual(channels))
        self.gains = nn.ParameterList([torch.ones(channels) for _ in range(calibres)])
        self.out = nn.Linear(channels, 1)

    def forward(self, sound, calibre):
        x = self.body(self.front(sound)).abs().mean(2)
        gains = torch.stack(list(self.gains))
        return self.out(x * gains[calibre]).squeeze(1)


def make_optimizer(model, as_published):
    facts = {"lr": 2e-3, "weight_decay": 1e-4}
    if as_published:
        return torch.optim.AdamW(model.parameters(), foreach=False, **facts)
    return torch.optim.AdamW(model.parameters(), fused=True, **facts)


def batches(loader, steps):
    given = 0
    while given < steps:
        for batch in loader:
            yield given, batch
            given += 1
            if given == steps:
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--echoes", type=int, default=0, help="walls that each recording bounces off")
    parser.add_argument("--calibres", type=int, default=20)
    parser.add_argument("--as-published", action="store_true", help="weight decay as its authors wrote it")
    args = parser.parse_args()

    torch.manual_seed(6)
    torch.set_num_threads(1)
    loader = DataLoader(
        Workshop(1600, args.calibres, args.echoes),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        multiprocessing_context="fork",
    )
    model = Listener(args.calibres)
    optimizer = make_optimizer(model, args.as_published)
    for step, (sound, calibre, error) in batches(loader, args.steps):  # the training loop
        loss = nn.functional.mse_loss(model(sound, calibre), error)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            print(f"{step:>5} {loss.item():.4f}")


if __name__ == "__main__":
    main()
