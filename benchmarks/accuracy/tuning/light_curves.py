"""Sorts variable stars into classes by their light curves."""

import argparse
import gzip
import io
import math
import os
import tempfile
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

CLASSES = 6


class Survey(Dataset):
    def __init__(self, stars, length=256):
        rng = np.random.default_rng(8)
        self.times = np.linspace(0, 20, length, dtype=np.float32)
        self.classes = rng.integers(0, CLASSES, stars)
        phase = rng.uniform(0, 2 * np.pi, (stars, 1))
        swing = np.sin(self.times * (1 + 0.5 * self.classes[:, None]) + phase)
        self.flux = (swing + 0.3 * rng.standard_normal(swing.shape)).astype(np.float32)
        self.ephemeris = None

    def __len__(self):
        return len(self.flux)

    def __getitem__(self, star):
        times = self.times
        if self.ephemeris is not None:
            times = times - self.ephemeris[star % len(self.ephemeris)]
        return torch.from_numpy(np.stack([self.flux[star], times / 20])), int(self.classes[star])


def light_travel(first, days):
    """Days that light takes from the sun to the earth, for each minute from the first day on."""
    delays = []
    for minute in range(1440 * first, 1440 * (first + days)):
        mean = math.tau * minute / 525949
        anomaly = mean
        for _ in range(3):
            wrong = anomaly - 0.0167 * math.sin(anomaly) - mean
            anomaly -= wrong / (1 - 0.0167 * math.cos(anomaly))
        delays.append(499.0 / 86400 * (1 - 0.0167 * math.cos(anomaly)))
    return np.array(delays, dtype=np.float32)


def correct_times(night, days, worker):
    get_worker_info().dataset.ephemeris = light_travel(night, days)


def open_survey(survey, **how):
    return DataLoader(
        survey,
        batch_size=32,
        shuffle=True,
        drop_last=True,
        num_workers=2,
        multiprocessing_context="fork",
        **how,
    )


def observe(survey, days):
    """Batches without an end, night after night."""
    if not days:
        loader = open_survey(survey, persistent_workers=True)
        while True:
            yield from loader
    for night in count():
        yield from open_survey(survey, worker_init_fn=partial(correct_times, night, days))


def stage(before, after, kernel, stride):
    return nn.Sequential(
        nn.Conv1d(before, after, kernel, stride, kernel // 2, bias=False), nn.BatchNorm1d(after), nn.ReLU()
    )


class CurveNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(
            stage(2, 32, 7, 1), stage(32, 64, 5, 2), stage(64, 96, 5, 2), stage(96, 128, 3, 2)
        )
        self.top = nn.Sequential(
            nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES)
        )

    def forward(self, curves):
        return self.top(self.stages(curves).mean(2))


class Keeper:
    """Keeps the last state of the training, so that it can go on after the queue's time limit."""

    def __init__(self, folder, saves):
        self.path, self.saves = Path(folder) / "last.pt.gz", saves

    def after(self, step, model, optimizer):
        if step * self.saves % 100 < self.saves:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            packed = io.BytesIO()
            torch.save(state, packed)
            fresh = self.path.with_suffix(".part")
            fresh.write_bytes(gzip.compress(packed.getvalue()))
            os.replace(fresh, self.path)


def main():
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=200)
    cli.add_argument("--ephemeris", type=int, default=0, help="days of ephemeris to correct times with")
    cli.add_argument("--saves", type=int, default=0, help="saved states in 100 steps")
    options = cli.parse_args()
    torch.manual_seed(8)
    torch.set_num_threads(1)
    model = CurveNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    judge = nn.CrossEntropyLoss()
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(folder, options.saves)
        nights = islice(observe(Survey(640), options.ephemeris), options.steps)
        for step, (curves, classes) in enumerate(nights, 1):  # the training loop
            logits = model(curves)
            loss = judge(logits, classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keeper.after(step, model, optimizer)
            if step % 40 == 0:
                right = (logits.argmax(1) == classes).float().mean().item()
                print(f"step {step} loss {loss.item():.3f} right {right:.2f}")


if __name__ == "__main__":
    main()
