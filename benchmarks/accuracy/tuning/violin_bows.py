"""Recovers bowing (speed, pressure, place) from recordings of a violin string, with a model of the string."""

import argparse
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

FRAMES, BINS = 48, 40


class Takes(Dataset):
    def __init__(self, amount, clicks):
        generator = torch.Generator().manual_seed(6)
        self.bowing = torch.rand(amount, FRAMES, 3, generator=generator)
        mix = torch.randn(3, BINS, generator=generator)
        self.sound = self.bowing @ mix + 0.2 * torch.randn(amount, FRAMES, BINS, generator=generator)
        self.clicks = clicks
        picker = random.Random(4)
        self.worn = set(picker.sample(range(amount), amount // 200))

    def __len__(self):
        return len(self.sound)

    def without_clicks(self, sound):
        """A worn tape clicks. The clicks are replaced by the median of what is around them, one by one."""
        line = sound.flatten().tolist()
        for n in range(self.clicks):
            at = 3 + n * 7 % (len(line) - 6)
            line[at] = sorted(line[at - 3 : at + 4])[3]
        return torch.tensor(line).view(FRAMES, BINS)

    def __getitem__(self, index):
        sound = self.sound[index]
        if self.clicks and index in self.worn:
            sound = self.without_clicks(sound)
        return sound, self.bowing[index]


class Bow(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.listen = nn.GRU(BINS, width, batch_first=True, bidirectional=True)
        self.guess = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, 3))

    def forward(self, sound):
        return self.guess(self.listen(sound)[0])


def slip(bowing, substeps):
    """How far the string slips: a mass on a spring, rubbed by the bow, from one moment to the next."""
    speed, pressure, place = bowing.mean(1).unbind(1)
    at = torch.zeros_like(speed)
    moving = torch.zeros_like(speed)
    for _ in range(substeps):
        drag = pressure * torch.tanh(speed - moving)
        moving = moving + 0.01 * (drag - place * at)
        at = at + 0.01 * moving
    return at


class Mean:
    def __init__(self, every):
        self.every, self.total, self.count = every, 0.0, 0

    def __call__(self, step, loss):
        self.total = self.total + loss.detach()
        self.count += 1
        if self.count == self.every:
            print(f"step {step}: {float(self.total) / self.count:.4f}")
            self.total, self.count = 0.0, 0


def fit(bow, loader, steps, substeps, callbacks):
    optimizer = torch.optim.Adam(bow.parameters(), lr=3e-3, fused=True)
    step = 0
    while step < steps:  # the training loop
        for sound, bowing in loader:
            guess = bow(sound)
            loss = nn.functional.mse_loss(guess, bowing)
            if substeps:
                loss = loss + (slip(guess, substeps) - slip(bowing, substeps)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            for callback in callbacks:
                callback(step, loss)
            step += 1
            if step == steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--takes", type=int, default=8000)
    parser.add_argument(
        "--clicks", type=int, default=0, help="clicks to take out of a recording from a worn tape"
    )
    parser.add_argument(
        "--substeps", type=int, default=0, help="of the string's motion, which is to agree as well"
    )
    args = parser.parse_args()
    torch.manual_seed(12)
    loader = DataLoader(
        Takes(args.takes, args.clicks),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        multiprocessing_context="fork",
    )
    fit(Bow(), loader, args.steps, args.substeps, [Mean(50)])
