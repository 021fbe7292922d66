"""Hears from one second of a hive's hum whether the queen is there."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

RATE = 8000


@dataclass
class Config:
    steps: int = 200
    rows: int = 32
    workers: int = 2
    lr: float = 2e-3
    reverb: int = 0
    neighbours: int = 0
    windows: int = 0
    passes: int = 0


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=Config.rows, help="clips in a batch")
    parser.add_argument("--workers", type=int, default=Config.workers)
    parser.add_argument("--lr", type=float, default=Config.lr)
    parser.add_argument("--reverb", type=int, default=0, help="taps of the box's impulse response")
    parser.add_argument("--neighbours", type=int, default=0, help="other hives heard in the background")
    parser.add_argument("--windows", type=int, default=0, help="windows for levelling the loudness")
    parser.add_argument("--passes", type=int, default=0, help="relaxation passes over dropouts")
    return Config(**vars(parser.parse_args()))


def record(amount):
    """Makes clips as the logger stores them: 16-bit, now and then with a dropout."""
    queen = (torch.arange(amount) % 4 != 0).long()
    time = torch.arange(RATE) / RATE
    pitch = torch.where(queen == 1, 230.0, 290.0) + 15 * torch.randn(amount)
    hum = torch.sin(6.2832 * pitch[:, None] * time) * 5000
    clips = (hum + 2500 * torch.randn(amount, RATE)).clamp(-32000, 32000).to(torch.int16)
    clips[7::127, 3000:3400] = 0
    return clips, queen


class BoxReverb:
    def __init__(self, taps):
        rng = np.random.default_rng(11)
        self.delays = np.sort(rng.integers(1, RATE // 2, taps)).tolist()
        self.gains = (rng.standard_normal(taps) * np.linspace(0.5, 0.01, taps) / taps**0.5).tolist()

    def __call__(self, wave):
        wet = wave.copy()
        for delay, gain in zip(self.delays, self.gains, strict=False):
            wet[delay:] += gain * wave[:-delay]
        return wet


def mend(wave, gap, passes):
    for _ in range(passes):
        wave = np.where(gap, 0.5 * (np.roll(wave, 1) + np.roll(wave, -1)), wave)
    return wave.astype(np.float32)


class HiveClips(Dataset):
    def __init__(self, clips, queen, config):
        self.clips, self.queen = clips, queen
        self.neighbours, self.passes = config.neighbours, config.passes
        self.dropouts = set(((clips == 0).sum(1) > 300).nonzero().flatten().tolist())
        self.transform = BoxReverb(config.reverb) if config.reverb else None

    def __len__(self):
        return len(self.clips)

    def read(self, index):
        wave = self.clips[index].numpy().astype(np.float32)
        wave *= 1 / 32768
        wave -= wave.mean()
        return wave

    def __getitem__(self, index):
        wave = self.read(index)
        if self.passes and index in self.dropouts:
            wave = mend(wave, self.clips[index].numpy() == 0, self.passes)
        for number in range(self.neighbours):
            other = self.read((index + 31 * number + 1) % len(self.clips))
            wave += 0.2 / self.neighbours * np.roll(other, 97 * number)
        if self.transform is not None:
            wave = self.transform(wave)
        wave = np.roll(wave, int(torch.randint(RATE, ())))
        return wave, int(self.queen[index])


class Levelled:
    """Puts clips together at the same loudness."""

    def __init__(self, windows):
        self.windows = windows

    def __call__(self, samples):
        waves, queens = zip(*samples, strict=False)
        batch = np.stack(waves)
        if self.windows:
            for wave in batch:
                loud = [np.percentile(part, 95) for part in np.array_split(np.abs(wave), self.windows)]
                wave /= float(np.median(loud)) + 1e-6
        else:
            batch /= np.abs(batch).max(1, keepdims=True) + 1e-6
        return torch.from_numpy(batch).unsqueeze(1), torch.tensor(queens)


def build_loader(config):
    clips, queen = record(2048)
    share = torch.bincount(queen).float()
    sampler = WeightedRandomSampler(1 / share[queen], config.steps * config.rows)
    return DataLoader(
        HiveClips(clips, queen, config),
        batch_size=config.rows,
        sampler=sampler,
        num_workers=config.workers,
        collate_fn=Levelled(config.windows),
        drop_last=True,
    )


def stage(inputs, outputs, kernel, stride):
    return nn.Sequential(
        nn.Conv1d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
        nn.BatchNorm1d(outputs),
        nn.ReLU(inplace=True),
    )


def build_model():
    return nn.Sequential(
        stage(1, 24, 33, 8),
        stage(24, 48, 7, 4),
        stage(48, 64, 5, 2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(64, 2),
    )


def train(config):
    loader = build_loader(config)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    for step, (waves, queens) in enumerate(loader, 1):  # the training loop
        loss = nn.functional.cross_entropy(model(waves), queens)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(5)
    torch.set_num_threads(1)
    train(parse())
