"""Tells pulsars from interference in dynamic spectra, with workers that make the observations noisy."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Spectra(Dataset):
    def __init__(self, amount, size=64):
        rng = np.random.default_rng(4)
        channel, time = np.mgrid[:size, :size].astype(np.float32)
        self.pulsar = rng.integers(0, 2, amount)
        self.clean = np.empty((amount, size, size), dtype=np.float32)
        for number, real in enumerate(self.pulsar):
            delay = 0.3 * channel if real else 0.0
            self.clean[number] = np.exp(-0.1 * (time - delay - rng.uniform(5, 40)) ** 2)
        self.rng = rng

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, number):
        spectrum = np.roll(self.clean[number], self.rng.integers(-8, 9), axis=1)
        spectrum += 0.5 * self.rng.standard_normal(spectrum.shape, dtype=np.float32)
        return torch.from_numpy(spectrum)[None], int(self.pulsar[number])


def reseed(worker):
    info = get_worker_info()
    info.dataset.rng = np.random.default_rng(info.seed)


class Unit(nn.Sequential):
    def __init__(self, before, after, stride):
        super().__init__(
            nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.SiLU(inplace=True)
        )


class Progress:
    def __init__(self, every):
        self.every, self.right, self.seen = every, torch.zeros(()), 0

    def after_step(self, step, logits, truth):
        self.right += (logits.argmax(1) == truth).sum()
        self.seen += len(truth)
        if step % self.every == 0:
            print(f"step {step}: {self.right.item() / self.seen:.3f} of {self.seen} right")
            self.right.zero_()
            self.seen = 0


class Learner:
    def __init__(self, model, loader, callbacks=()):
        self.model, self.loader, self.callbacks = model, loader, callbacks
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.step = 0

    def stream(self):
        while True:
            yield from self.loader

    def learn(self, spectra, truth):
        logits = self.model(spectra)
        loss = nn.functional.cross_entropy(logits, truth)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return logits.detach()

    def fit(self, steps):
        stream = self.stream()
        while self.step < steps:  # the training loop
            spectra, truth = next(stream)
            logits = self.learn(spectra, truth)
            self.step += 1
            for callback in self.callbacks:
                callback.after_step(self.step, logits, truth)


def main():
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    steps = cli.parse_args().steps
    torch.manual_seed(4)
    torch.set_num_threads(1)
    loader = DataLoader(
        Spectra(1024),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        prefetch_factor=4,
        persistent_workers=True,
        worker_init_fn=reseed,
    )
    model = nn.Sequential(
        Unit(1, 24, 2),
        Unit(24, 48, 2),
        Unit(48, 48, 1),
        Unit(48, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 2),
    )
    Learner(model, loader, [Progress(50)]).fit(steps)


if __name__ == "__main__":
    main()
