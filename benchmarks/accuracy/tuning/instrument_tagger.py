"""Tags short clips of music with the instruments that play, from mel spectrograms made on the fly."""

import argparse
import random
from copy import deepcopy

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

RATE = 8000
TAKES = 96
TAGS = 20
MELS = 40
WINDOW, HOP = 256, 128


class Clips(Dataset):
    """One second of a take, with other takes playing quietly in the background."""

    def __init__(self, clips, voices):
        self.clips, self.voices = clips, voices
        rng = np.random.default_rng(8)
        self.tags = (rng.random((TAKES, TAGS)) < 0.15).astype(np.float32)
        time = np.arange(3 * RATE // 2) / RATE
        tones = np.sin(2 * np.pi * time * np.geomspace(110, 3500, TAGS)[:, None])
        sound = self.tags @ tones + 0.3 * rng.standard_normal((TAKES, len(time)))
        self.takes = (sound * 3000).clip(-32767, 32767).astype(np.int16)
        self.room = np.exp(-np.arange(32) / 6.0)
        self.grid = np.arange(RATE, dtype=np.float64)
        self.window = np.hanning(WINDOW)
        bins, centres = np.arange(WINDOW // 2 + 1), np.geomspace(3, 120, MELS)
        self.filters = np.maximum(0.0, 1 - np.abs(bins[:, None] - centres) / (1 + 0.15 * centres))

    def __len__(self):
        return self.clips

    def cut(self, take):
        start = random.randrange(self.takes.shape[1] - RATE)
        return self.takes[take, start : start + RATE] / 32768.0

    def __getitem__(self, index):
        take = index % TAKES
        sound = self.cut(take)
        for _ in range(self.voices):
            other = self.cut(random.randrange(TAKES))
            detuned = np.interp(self.grid * random.uniform(0.96, 1.0), self.grid, other)
            sound += 0.02 * np.convolve(detuned, self.room, mode="same")
        frames = np.lib.stride_tricks.sliding_window_view(sound, WINDOW)[::HOP]
        power = np.abs(np.fft.rfft(frames * self.window)) ** 2
        mel = np.log(power @ self.filters + 1e-5)
        return np.ascontiguousarray(mel.T[None], dtype=np.float32), self.tags[take]


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Identity()
        if stride > 1:
            self.skip = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        y = torch.relu(self.first_norm(self.first(x)))
        return torch.relu(self.second_norm(self.second(y)) + self.skip(x))


def make_tagger():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 1),
        Block(32, 48, 2),
        Block(48, 48, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(48, TAGS),
    )


class Callback:
    def after_step(self, step, model, loss, logits, tags):
        pass


class Progress(Callback):
    def after_step(self, step, model, loss, logits, tags):
        if step % 50 == 0:
            print(f"{step} loss {loss.item():.4f}")


class WeightAverages(Callback):
    """Keeps averaged models with several horizons, to choose the best of them after the training."""

    def __init__(self, model, count):
        self.decays = [0.9 + 0.0995 * (number + 1) / count for number in range(count)]
        self.averaged = [deepcopy(model) for _ in range(count)]

    @torch.no_grad()
    def after_step(self, step, model, loss, logits, tags):
        for decay, average in zip(self.decays, self.averaged, strict=False):
            live, kept = model.state_dict(), average.state_dict()
            for name, value in live.items():
                if value.is_floating_point():
                    kept[name] = decay * kept[name] + (1 - decay) * value
                else:
                    kept[name] = value
            average.load_state_dict(kept)


class BestThresholds(Callback):
    """Finds, for each tag, the threshold with the best F1 on the batch."""

    def __init__(self, count):
        self.levels = [(number + 1) / (count + 1) for number in range(count)]
        self.best = {}

    def after_step(self, step, model, loss, logits, tags):
        probabilities = torch.sigmoid(logits.detach())
        for tag in range(TAGS):
            scores = []
            for level in self.levels:
                called = probabilities[:, tag] > level
                plays = tags[:, tag] > 0.5
                hits = (called & plays).sum().item()
                wrong = (called & ~plays).sum().item()
                missed = (~called & plays).sum().item()
                scores.append(2 * hits / max(1, 2 * hits + wrong + missed))
            self.best[tag] = max(zip(scores, self.levels, strict=False))


def endless(loader):
    while True:
        yield from loader


def fit(model, loader, optimizer, callbacks, steps):
    criterion = nn.BCEWithLogitsLoss()
    for step, (spectrograms, tags) in zip(range(steps), endless(loader), strict=False):  # the training loop
        logits = model(spectrograms)
        loss = criterion(logits, tags)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for callback in callbacks:
            callback.after_step(step, model, loss, logits, tags)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--voices", type=int, default=0, help="takes in the background of each clip")
    parser.add_argument("--averages", type=int, default=0, help="horizons of averaged weights")
    parser.add_argument("--thresholds", type=int, default=0, help="thresholds to try for each tag")
    args = parser.parse_args()
    torch.manual_seed(5)
    torch.set_num_threads(1)
    loader = DataLoader(
        Clips(1920, args.voices),
        batch_size=12,
        shuffle=True,
        drop_last=True,
        num_workers=args.workers,
        prefetch_factor=4,
        persistent_workers=True,
    )
    model = make_tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    callbacks = [Progress()]
    if args.averages:
        callbacks.append(WeightAverages(model, args.averages))
    if args.thresholds:
        callbacks.append(BestThresholds(args.thresholds))
    fit(model, loader, optimizer, callbacks, args.steps)


if __name__ == "__main__":
    main()
