"""Places vowels on a dialect map from a second of speech, whose spectra the loader's workers take."""

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

RATE, FRAME, HOP, BANDS = 8000, 256, 80, 64


@dataclass
class Config:
    steps: int
    rows: int = 24
    clips: int = 1200
    width: int = 112


class Vowels(Dataset):
    def __init__(self, clips):
        rng = np.random.default_rng(31)
        self.places = rng.random((clips, 2), dtype=np.float32)
        time = np.arange(RATE, dtype=np.float32) * np.float32(2 * np.pi / RATE)
        first, second = 300 + 500 * self.places[:, :1], 900 + 1400 * self.places[:, 1:]
        voice = np.sin(first * time) + 0.5 * np.sin(second * time)
        voice += 0.2 * rng.standard_normal(voice.shape, dtype=np.float32)
        self.waves = (voice * 12000).astype(np.int16)
        self.window = np.hanning(FRAME).astype(np.float32)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        wave = self.waves[index].astype(np.float32) / 32768
        wave = np.roll(wave, np.random.randint(RATE)) * np.float32(np.random.uniform(0.6, 1.4))
        frames = np.lib.stride_tricks.sliding_window_view(wave, FRAME)[::HOP] * self.window
        power = np.abs(np.fft.rfft(frames, axis=1)[:, 1 : 1 + 2 * BANDS])
        bands = np.log(power.reshape(len(frames), BANDS, 2).sum(axis=2) + 1e-3)
        return torch.from_numpy(bands.T.astype(np.float32)), torch.from_numpy(self.places[index])


class VowelNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(BANDS, width, 5, padding=2, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Conv1d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm1d(width),
            nn.ReLU(),
        )
        self.place = nn.Linear(width, 2)

    def forward(self, bands):
        return self.place(self.body(bands).mean(dim=2))


def loader_of(config):
    vowels = Vowels(config.clips)
    sampler = RandomSampler(vowels, replacement=True, num_samples=config.steps * config.rows)
    return DataLoader(vowels, batch_size=config.rows, sampler=sampler, num_workers=2, prefetch_factor=4)


def train(config):
    model = VowelNet(config.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    distance = 0.0
    for step, (bands, places) in enumerate(loader_of(config), 1):  # the training loop
        loss = nn.functional.smooth_l1_loss(model(bands), places, beta=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 40 == 0:
            distance = loss.item()
            print(f"{step:4d} off by {distance:.4f}")
    return distance


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    torch.manual_seed(31)
    torch.set_num_threads(1)
    train(Config(parser.parse_args().steps))


if __name__ == "__main__":
    main()
