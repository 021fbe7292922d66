"""Learns the field of force of a small cluster from tracks of its bodies (a neural ODE with RK4)."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing as mp
import os
import random
import tempfile

import numpy as np
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

MASSES = ((0.0, 0.0, 1.0), (1.5, 0.4, 0.3), (-0.8, -1.2, 0.2))


def pull(pos):
    acc = np.zeros_like(pos)
    for x, y, m in MASSES:
        d = np.array([x, y]) - pos
        acc += m * d / (np.square(d).sum(-1, keepdims=True) + 0.05) ** 1.5
    return acc


def leapfrog(state, dt, steps):
    pos, vel = state[..., :2].copy(), state[..., 2:].copy()
    vel += 0.5 * dt * pull(pos)
    for _ in range(steps):
        pos += dt * vel
        vel += dt * pull(pos)
    return np.concatenate([pos, vel - 0.5 * dt * pull(pos)], -1)


class Tracks(Dataset):
    """item = list of indices -> (start, end) of that many tracks"""

    def __init__(self, n: int, stations: int, rng: np.random.Generator):
        start = rng.normal(0, 1, (n, 4)).astype(np.float64)
        self.start = torch.from_numpy(start.astype(np.float32))
        self.end = torch.from_numpy(leapfrog(start, 0.01, 50).astype(np.float32))
        self.stations, self.rng = stations, rng

    def __len__(self):
        return len(self.start)

    def observe(self, state: np.ndarray) -> np.ndarray:
        """what the stations make of a state: each has its own errors and sees only angle and distance"""
        total = np.zeros(4)
        for _ in range(self.stations):
            site = self.rng.normal(0, 3, 2)
            dx, dy = state[:2] - site
            far = np.hypot(dx, dy) * (1 + self.rng.normal(0, 1e-3))
            angle = np.arctan2(dy, dx) + self.rng.normal(0, 1e-3)
            total[0] += site[0] + far * np.cos(angle)
            total[1] += site[1] + far * np.sin(angle)
            total[2:] += state[2:] * (1 + self.rng.normal(0, 1e-3, 2))
        return total / self.stations

    def __getitem__(self, which):
        start, end = self.start[which], self.end[which]
        if self.stations:
            start = torch.from_numpy(np.stack([self.observe(s) for s in start.numpy()]).astype(np.float32))
        return start, end


class Field(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2)
        )

    def forward(self, state):
        pos, vel = state.chunk(2, -1)
        return torch.cat([vel, self.net(pos)], -1)


def rk4(f, y, t, steps):
    h = t / steps
    for _ in range(steps):
        a = f(y)
        b = f(y + h / 2 * a)
        c = f(y + h / 2 * b)
        d = f(y + h * c)
        y = y + h / 6 * (a + 2 * (b + c) + d)
    return y


def integrate_on_request(pipe):
    while (job := pipe.recv()) is not None:
        state, substeps = job
        pipe.send(leapfrog(state, 0.5 / substeps, substeps))


class Reference:
    """The group's integrator, which runs as a program of its own."""

    def __init__(self):
        ctx = mp.get_context("spawn")
        self.pipe, theirs = ctx.Pipe()
        self.process = ctx.Process(target=integrate_on_request, args=(theirs,), daemon=True)
        self.process.start()

    def ask(self, state, substeps):
        self.pipe.send((state, substeps))
        return self.pipe.recv()

    def close(self):
        self.pipe.send(None)
        self.process.join()


def keep_latest(profile):
    profile.export_chrome_trace(os.path.join(tempfile.gettempdir(), f"orbit_fits_{os.getpid()}.json"))


def endless(loader):
    while True:
        yield from loader


def main(args):
    torch.manual_seed(args.seed)
    dice = random.Random(args.seed)
    data = Tracks(16384, args.stations, np.random.default_rng(args.seed))
    sampler = BatchSampler(RandomSampler(data), args.orbits, drop_last=True)
    loader = DataLoader(data, sampler=sampler, batch_size=None)  # slices of tensors: no need of workers
    field = Field()
    opt = torch.optim.Adam(field.parameters(), lr=2e-3, fused=True)
    reference = Reference() if args.reference else None
    drift = 0.0
    profiler = contextlib.nullcontext()
    if args.profile_steps:
        active = min(args.profile_steps, 19)
        profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU],
            record_shapes=True,
            on_trace_ready=keep_latest,
            schedule=torch.profiler.schedule(wait=19 - active, warmup=1, active=active),
        )
    with profiler:
        batches = endless(loader)
        for step in range(args.steps):  # the training loop
            start, end = next(batches)
            # now and then on a finer grid, lest the field fits the errors of the coarse one
            grid = args.grid + (args.fine_grid if dice.random() < 1 / 12 else 0)
            guess = rk4(field, start, 0.5, grid)
            loss = (guess - end).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if reference:
                # a few bodies again with the true forces: how far off are we, beyond noise?
                true = reference.ask(start[:32].double().numpy(), args.reference)
                drift += 0.05 * (float(np.abs(true - guess[:32].detach().numpy()).mean()) - drift)
            if args.profile_steps:
                profiler.step()
            if step % 40 == 0:
                print(f"{step:4d}: loss {loss.item():.5f} drift {drift:.4f}")
    if reference:
        reference.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=23)
    parser.add_argument("--orbits", type=int, default=256, help="tracks in a batch")
    parser.add_argument("--grid", type=int, default=6, help="steps of the solver")
    parser.add_argument(
        "--fine-grid", type=int, default=0, help="more of them, in one batch of twelve or so"
    )
    parser.add_argument("--stations", type=int, default=0, help="observe each start from so many stations")
    parser.add_argument(
        "--reference", type=int, default=0, help="follow the drift; substeps of the integrator"
    )
    parser.add_argument(
        "--profile-steps", type=int, default=0, help="profile so many of every 20 steps (up to 19)"
    )
    main(parser.parse_args())
