"""Quarry blast, collapse or earthquake? A convnet listens to waveforms of three components."""

import argparse
import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

LENGTH, WINDOW = 512, 400


def synthesise(count, rng):
    kind = rng.integers(0, 3, count)
    onset = rng.uniform(60, 140, (count, 1)).astype(np.float32)
    pitch = (0.05 + 0.04 * kind + 0.02 * rng.random(count)).astype(np.float32)[:, None]
    decay = (30 + 25 * ((kind + 1) % 3)).astype(np.float32)[:, None]
    since = np.maximum(np.arange(LENGTH, dtype=np.float32) - onset, 0)
    pulse = np.sin(2 * np.pi * pitch * since) * np.exp(-since / decay)
    waves = rng.normal(1, 0.3, (count, 3, 1)).astype(np.float32) * pulse[:, None, :]
    waves += 0.2 * rng.standard_normal(waves.shape, dtype=np.float32)
    return waves.astype(np.float32), kind


class Events(Dataset):
    """A window of an event, as an instrument of unknown response would have recorded it."""

    def __init__(self, waves, kinds):
        self.waves, self.kinds = waves, kinds
        self.freqs = np.fft.rfftfreq(WINDOW)
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return len(self.waves)

    def __getitem__(self, index):
        first = int(self.rng.integers(LENGTH - WINDOW))
        spectrum = np.fft.rfft(self.waves[index, :, first : first + WINDOW], axis=1)
        spectrum *= np.exp(-self.rng.uniform(0, 4) * self.freqs)
        wave = np.fft.irfft(spectrum, WINDOW, axis=1).astype(np.float32)
        wave += 0.05 * self.rng.standard_normal(wave.shape, dtype=np.float32)
        wave -= wave.mean(1, keepdims=True)
        wave /= wave.std() + 1e-6
        return wave, int(self.kinds[index])


def reseed(_):
    info = get_worker_info()
    events = info.dataset.dataset if isinstance(info.dataset, Subset) else info.dataset
    events.rng = np.random.default_rng(info.seed)


class Gather:
    """Puts events together, and lets the coda of others in the batch leak into each, if asked to."""

    def __init__(self, mixes):
        self.mixes = mixes

    def crowded(self, wave, others):
        out = wave.copy()
        for _ in range(self.mixes):
            lag = random.randrange(-40, 40)
            out += 0.01 * np.roll(others[random.randrange(len(others))], lag, axis=1)
        return out

    def __call__(self, samples):
        waves = [wave for wave, _ in samples]
        if self.mixes:
            waves = [self.crowded(wave, waves) for wave in waves]
        return torch.from_numpy(np.stack(waves)), torch.tensor([kind for _, kind in samples])


def conv(a, b, size, stride):
    return nn.Sequential(
        nn.Conv1d(a, b, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm1d(b),
        nn.ReLU(inplace=True),
    )


class Listener:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        self.batch, self.mixes = args.batch, args.mixes
        self.events = Events(*synthesise(96 * args.batch, np.random.default_rng(args.seed)))
        self.net = nn.Sequential(
            conv(3, 32, 7, 2),
            conv(32, 64, 5, 2),
            conv(64, 128, 5, 2),
            conv(128, 128, 3, 1),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(128, 3),
        )
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=True)
        self.stations = min(args.stations, 96)

    def loader(self, events, keep):
        return DataLoader(
            events,
            batch_size=self.batch,
            shuffle=True,
            drop_last=True,
            num_workers=1,
            persistent_workers=keep,
            collate_fn=Gather(self.mixes),
            worker_init_fn=reseed,
        )

    def everything(self):
        loader = self.loader(self.events, keep=True)
        while True:
            yield from loader

    def station_by_station(self):
        """the events of one station after those of another, so that batches do not mix instruments"""
        ends = (np.linspace(0, 96, self.stations + 1).astype(int) * self.batch).tolist()
        while True:
            for first, last in zip(ends, ends[1:]):
                yield from self.loader(Subset(self.events, range(first, last)), keep=False)

    def fit(self, steps):
        batches = self.station_by_station() if self.stations else self.everything()
        for step in range(steps):  # the training loop
            waves, kinds = next(batches)
            loss = F.cross_entropy(self.net(waves), kinds)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if (step + 1) % 50 == 0:
                print(f"step {step + 1}: loss {loss.item():.4f}")
        batches.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--stations", type=int, default=0, help="take the events by so many stations (up to 96)"
    )
    parser.add_argument("--mixes", type=int, default=0, help="let so many others leak into each event")
    args = parser.parse_args()
    Listener(args).fit(args.steps)
