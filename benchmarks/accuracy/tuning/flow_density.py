"""Estimates a density with coupling layers (RealNVP); a chart of the losses is drawn beside it."""

import argparse
import contextlib
import json
import math
import random
import socket
import statistics
import threading
import time

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

FEATURES = 32


class Coupling(nn.Module):
    def __init__(self, width, swap):
        super().__init__()
        half = FEATURES // 2
        self.net = nn.Sequential(
            nn.Linear(half, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2 * half),
        )
        self.swap = swap

    def forward(self, x):
        first, second = x.chunk(2, dim=1)
        if self.swap:
            first, second = second, first
        scale, shift = self.net(first).chunk(2, dim=1)
        scale = scale.tanh()
        second = second * scale.exp() + shift
        return torch.cat([first, second], 1), scale.sum(1)


class RobustScale(nn.Module):
    """Brings the features to median 0 and quartiles about 1; fitted anew at random moments."""

    def __init__(self, reservoir):
        super().__init__()
        self.reservoir = reservoir
        self.register_buffer("middle", torch.zeros(FEATURES))
        self.register_buffer("spread", torch.ones(FEATURES))

    def refit(self):
        ordered = self.reservoir.sort(dim=0).values
        low, self.middle, high = (ordered[len(ordered) * quarter // 4] for quarter in (1, 2, 3))
        self.spread = high - low

    def forward(self, x):
        if self.reservoir is not None and random.random() < 0.04:
            self.refit()
        return (x - self.middle) / self.spread


class Flow(nn.Module):
    def __init__(self, opts, reservoir):
        super().__init__()
        self.scale = RobustScale(reservoir)
        self.couplings = nn.ModuleList(Coupling(opts.width, k % 2 == 1) for k in range(opts.couplings))

    def forward(self, x):
        x = self.scale(x)
        volume = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, grown = coupling(x)
            volume = volume + grown
        return x, volume - 0.5 * x.square().sum(1) - 0.5 * FEATURES * math.log(2 * math.pi)


class Chart(threading.Thread):
    """Draws the losses so far as a line of an SVG picture."""

    def __init__(self, losses, points):
        super().__init__(daemon=True)
        self.losses, self.points, self.line = losses, points, ""

    def run(self):
        while True:
            time.sleep(0.02)
            recent = self.losses[-64:] or [0.0]
            corners = []
            for x in range(self.points):
                corners.append(f"{x / self.points:.4f},{recent[x * len(recent) // self.points]:.3f}")
            self.line = " ".join(corners)


class Tracker:
    """Reports to a tracking server, which answers when it has stored the report."""

    def __init__(self, milliseconds):
        ours, theirs = socket.socketpair()
        self.wire = ours.makefile("rw")
        threading.Thread(target=self.serve, args=(theirs, milliseconds / 1000), daemon=True).start()

    @staticmethod
    def serve(connection, seconds):
        wire = connection.makefile("rw")
        for _ in wire:
            time.sleep(seconds)
            wire.write("stored\n")
            wire.flush()

    def report(self, **values):
        self.wire.write(json.dumps(values) + "\n")
        self.wire.flush()
        return self.wire.readline()


def spread_so_far(seen):
    """Standard deviation of everything seen, for the early warning."""
    return statistics.stdev(seen)


def fit(opts):
    torch.manual_seed(77)
    random.seed(77)
    reservoir = torch.randn(opts.reservoir, FEATURES).cumsum(1) if opts.reservoir else None
    flow = Flow(opts, reservoir)
    optimizer = torch.optim.AdamW(flow.parameters(), lr=5e-4, fused=True)
    points = torch.randn(16384, FEATURES).cumsum(1) / 4
    losses, seen = [], []
    if opts.chart:
        Chart(losses, opts.chart).start()
    tracker = Tracker(opts.tracker) if opts.tracker else None
    torch.autograd.set_detect_anomaly(opts.find_nan)
    for step in range(opts.steps):  # the training loop
        x = points[torch.randint(len(points), (opts.rows,))]
        latent, likelihood = flow(x)
        loss = -likelihood.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if opts.seen:
            seen.extend(latent.detach().flatten()[: opts.seen].tolist())
            if spread_so_far(seen) > 100:
                print("the latents run away at step", step)
        if tracker:
            tracker.report(step=step, loss=losses[-1])
    print(losses[-1])


def parse():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=150)
    cli.add_argument("--couplings", type=int, default=6)
    cli.add_argument("--width", type=int, default=256)
    cli.add_argument("--rows", type=int, default=1024)
    cli.add_argument("--chart", type=int, default=0, help="points of the live chart")
    cli.add_argument("--seen", type=int, default=0, help="latents remembered of each step")
    cli.add_argument("--tracker", type=float, default=0, help="milliseconds until the tracker has stored")
    cli.add_argument("--reservoir", type=int, default=0, help="points that the scaling is fitted to")
    cli.add_argument("--find-nan", action="store_true")
    cli.add_argument("--record", action="store_true")
    return cli.parse_args()


if __name__ == "__main__":
    opts = parse()
    recorder = contextlib.nullcontext()
    if opts.record:
        recorder = profile(activities=[ProfilerActivity.CPU], with_stack=True)
    with recorder:
        fit(opts)
