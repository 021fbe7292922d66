"""Finds broken rail joints in what the axle boxes of a train record (a mixer on short spectra)."""

import argparse
import contextlib

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.data import DataLoader, Dataset, RandomSampler

CLIP, WINDOW, HOP, DEFECTS = 4224, 256, 128, 5
HANN = np.hanning(WINDOW).astype(np.float32)
TAPS = np.hanning(64).astype(np.float32) / 32


class Rides(Dataset):
    """A random clip of a ride with random noise, as log spectra of 32 moments."""

    def __init__(self, count=400, minutes=0, seed=12):
        self.rng = np.random.default_rng(seed)
        self.defect = self.rng.integers(0, DEFECTS, count)
        self.minutes = minutes
        pitch = (0.05 + 0.11 * self.defect).astype(np.float32)[:, None]
        time = np.arange(16384, dtype=np.float32)
        self.rides = self.rng.standard_normal((count, len(time)), dtype=np.float32)
        self.rides += np.sin(pitch * time)

    def __len__(self):
        return len(self.rides)

    def from_old_logger(self, ride):
        """the car with the old logger keeps its rides whole, and at 16 times the rate"""
        slow = []
        for _ in range(self.minutes):
            raw = np.repeat(ride[:8192], 16)
            raw += 0.1 * self.rng.standard_normal(len(raw), dtype=np.float32)
            slow.append(np.convolve(raw, TAPS, "same")[::16])
        return np.concatenate(slow)

    def __getitem__(self, i):
        ride = self.rides[i]
        if self.minutes and i % 200 == 0:
            ride = self.from_old_logger(ride)
        start = self.rng.integers(len(ride) - CLIP)
        clip = ride[start : start + CLIP] + 0.2 * self.rng.standard_normal(CLIP, dtype=np.float32)
        frames = sliding_window_view(clip, WINDOW)[::HOP] * HANN
        spectra = np.log1p(np.abs(np.fft.rfft(frames)))[:, :128]
        return torch.from_numpy(spectra.astype(np.float32)), int(self.defect[i])


class Mix(nn.Module):
    def __init__(self, moments, dim):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.time = nn.Sequential(
            nn.Linear(moments, 2 * moments), nn.GELU(), nn.Linear(2 * moments, moments)
        )
        self.tone = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.time(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.tone(self.norms[1](x))


class Inspector(nn.Module):
    def __init__(self, dim=96, depth=5):
        super().__init__()
        self.enter = nn.Linear(128, dim)
        self.mixers = nn.Sequential(*[Mix(32, dim) for _ in range(depth)])
        self.leave = nn.Linear(dim, DEFECTS)

    def forward(self, x):
        return self.leave(self.mixers(self.enter(x)).mean(1))


def microscope(active):
    """which operators are worth a look? (asked when we still had the slow version)"""
    if not active:
        return contextlib.nullcontext()
    heaviest = {}

    def look(session):
        for entry in session.key_averages(group_by_input_shape=True):
            heaviest[entry.key] = max(heaviest.get(entry.key, 0), entry.self_cpu_time_total)

    active = min(active, 19)
    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=19 - active, warmup=1, active=active),
        on_trace_ready=look,
        record_shapes=True,
        profile_memory=True,
    )


def run(steps, batch, minutes, microscopic):
    torch.manual_seed(12)
    rides = Rides(minutes=minutes)
    draw = RandomSampler(rides, replacement=True, num_samples=steps * batch)
    loader = DataLoader(rides, batch_size=batch, sampler=draw, num_workers=1)
    net = Inspector()
    opt = torch.optim.Adam(net.parameters(), 1e-3, fused=True)
    with microscope(microscopic) as session:
        for step, (spectra, defect) in enumerate(loader):  # the training loop
            loss = F.cross_entropy(net(spectra), defect)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            if session is not None:
                session.step()
            if step % 50 == 0:
                print(f"{step} {loss.item():.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--old-logger", type=int, default=0, metavar="MINUTES", help="with the old car's rides"
    )
    parser.add_argument("--microscope", type=int, default=0, help="look closely at so many of 20 steps")
    a = parser.parse_args()
    run(a.steps, a.batch, a.old_logger, a.microscope)
