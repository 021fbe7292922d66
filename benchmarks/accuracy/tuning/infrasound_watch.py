"""Which kind of source made this infrasound? Windows of four-sensor arrays, classified by a 1-d convnet."""

import argparse
import time
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

SOURCES, SENSORS, LENGTH, WINDOW = 6, 4, 1024, 768


@dataclass
class Config:
    steps: int = 200
    batch: int = 32
    lr: float = 2e-3
    workers: int = 1
    latency_us: int = 0
    responses: int = 0
    surroundings: int = 0


class Archive:
    """Windows in the order in which they were recorded."""

    def __init__(self, count, latency_us, seed=11):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(0, SOURCES, count)
        self.traces = rng.standard_normal((count, SENSORS, LENGTH), dtype=np.float32)
        tones = np.sin(np.arange(LENGTH) * (0.05 + 0.04 * np.arange(SOURCES)[:, None]))
        self.traces += 0.7 * tones[self.kinds, None].astype(np.float32)
        self.round_trip = latency_us / 1e6

    def __len__(self):
        return len(self.kinds)

    def read(self, k):
        if self.round_trip:
            time.sleep(self.round_trip)  # the array's server is far away
        return self.traces[k], self.kinds[k]

    def around(self, k, width):
        first = max(0, min(k - width // 2, len(self) - width))
        return self.traces[first : first + width]


class Windows(Dataset):
    def __init__(self, archive, config):
        self.archive, self.config = archive, config
        self.clock = np.arange(WINDOW, dtype=np.float32)
        self.rng = None

    def __len__(self):
        return len(self.archive)

    def stretch(self, trace):
        """A random start and speed."""
        speed = self.rng.uniform(0.9, 1.1)
        start = self.rng.uniform(0, LENGTH - 1.1 * WINDOW)
        at = start + speed * self.clock
        return np.stack([np.interp(at, np.arange(LENGTH), channel) for channel in trace])

    def site(self, trace):
        """As if it had been recorded by another array, with a response of its own."""
        bands = np.fft.rfft(trace, axis=1)
        knots = self.rng.normal(0, 0.1, 8)
        response = np.exp(np.interp(np.linspace(0, 7, bands.shape[1]), np.arange(8), knots))
        delay = np.exp(-1j * self.rng.normal(0, 0.01) * np.arange(bands.shape[1]))
        return np.fft.irfft(bands * (response * delay), n=trace.shape[1], axis=1)

    def __getitem__(self, k):
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed() % 2**32)
        trace, kind = self.archive.read(k)
        trace = self.stretch(trace)
        for _ in range(self.config.responses):
            trace = self.site(trace)
        trace -= trace.mean(1, keepdims=True)
        trace /= trace.std() + 1e-6
        around = None
        if self.config.surroundings:
            around = self.archive.around(k, self.config.surroundings)
        return trace.astype(np.float32), kind, around


def together(samples):
    traces, kinds, around = zip(*samples)
    return torch.from_numpy(np.stack(traces)), torch.from_numpy(np.array(kinds)), around


class Listener(nn.Sequential):
    def __init__(self):
        def stage(a, b, k):
            return [nn.Conv1d(a, b, k, 2, k // 2, bias=False), nn.BatchNorm1d(b), nn.ReLU(inplace=True)]

        super().__init__(
            *stage(SENSORS, 24, 9),
            *stage(24, 48, 7),
            *stage(48, 64, 5),
            *stage(64, 64, 3),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(64, SOURCES),
        )


class Trainer:
    def __init__(self, config):
        torch.manual_seed(1)
        self.config = config
        data = Windows(Archive(2000, config.latency_us), config)
        self.loader = DataLoader(
            data,
            config.batch,
            sampler=RandomSampler(data, replacement=True, num_samples=config.steps * config.batch),
            num_workers=config.workers,
            collate_fn=together,
            multiprocessing_context="fork" if config.workers else None,
        )
        self.model = Listener()
        self.criterion = nn.CrossEntropyLoss(reduction="none")
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=config.lr, fused=True)
        self.oddest = None

    def fit(self):
        self.model.train()
        for step, (traces, kinds, around) in enumerate(self.loader):  # the training loop
            losses = self.criterion(self.model(traces), kinds)
            loss = losses.mean()
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            if self.config.surroundings:
                # for the analysts: what was going on around the oddest of them
                self.oddest = around[int(losses.detach().argmax())]
            if step % 100 == 99:
                print(f"step {step + 1} loss {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    for field in fields(Config)[1:]:
        parser.add_argument("--" + field.name.replace("_", "-"), type=field.type, default=field.default)
    Trainer(Config(**vars(parser.parse_args()))).fit()
