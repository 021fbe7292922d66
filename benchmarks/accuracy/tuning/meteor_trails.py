"""Finds the trail of a meteor: a frame of the camera goes through convolutions, the brightness over time
through a small recurrent network, and both have to agree on where it began and ended."""

import argparse
import math
import os
import random
import threading

import torch
import torch.nn.functional as F
from torch import nn

SIDE, TICKS = 40, 10


def night_sky(count, seed):
    source = torch.Generator().manual_seed(seed)
    ends = torch.rand(count, 2, 2, generator=source) * 2 - 1
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    pixel = torch.stack([y, x], -1).view(1, SIDE * SIDE, 2)
    start, way = ends[:, :1], ends[:, 1:] - ends[:, :1]
    along = (((pixel - start) * way).sum(-1) / way.square().sum(-1).clamp_min(1e-3)).clamp(0, 1)
    far = (pixel - start - along.unsqueeze(-1) * way).square().sum(-1)
    sky = torch.exp(-200 * far) + 0.2 * torch.randn(count, SIDE * SIDE, generator=source)
    glow = way.norm(dim=-1) * torch.sin(torch.linspace(0, math.pi, TICKS)).view(1, TICKS)
    glow = torch.stack([glow, glow.square()], -1) + 0.05 * torch.randn(count, TICKS, 2, generator=source)
    return sky.view(count, 1, SIDE, SIDE), glow, ends.flatten(1)


class Radiants(threading.Thread):
    """Sorts last night's trails into showers, again and again, as new ones come in."""

    def __init__(self, showers):
        super().__init__(daemon=True)
        self.showers, self.dawn = showers, threading.Event()
        draw = random.Random(5)
        self.known = [(draw.uniform(0, 360), draw.uniform(-90, 90)) for _ in range(2000)]
        self.counts = {}

    def nearest(self, ra, dec):
        best, where = 1e9, 0
        for place, (a, d) in enumerate(self.known):
            off = min(abs(a - ra), 360 - abs(a - ra)) ** 2 + (d - dec) ** 2
            if off < best:
                best, where = off, place
        return where

    def run(self):
        draw = random.Random(6)
        while not self.dawn.wait(0.025):
            for _ in range(self.showers):
                where = self.nearest(draw.uniform(0, 360), draw.uniform(-90, 90))
                self.counts[where] = self.counts.get(where, 0) + 1


class Trail(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.frame = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(5),
            nn.Flatten(),
            nn.Linear(2 * width * 25, 4),
        )
        self.glow = nn.GRU(2, 24, batch_first=True)
        self.length = nn.Linear(24, 1)

    def forward(self, sky, glow):
        return self.frame(sky), self.length(self.glow(glow)[1][-1]).squeeze(-1)


def losses(place, length, ends):
    true = (ends[:, 2:] - ends[:, :2]).norm(dim=1)
    guessed = (place[:, 2:] - place[:, :2]).norm(dim=1)
    return F.mse_loss(place, ends), F.mse_loss(length, true), F.mse_loss(guessed, length.detach())


def main(steps, frames, showers, leave_room):
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(1 if leave_room else cpus)
    torch.manual_seed(5)
    sky, glow, ends = night_sky(1500, 5)
    radiants = Radiants(showers)
    if showers:
        radiants.start()
    trail = Trail()
    adam = torch.optim.Adam(trail.parameters(), lr=1e-3, fused=True)
    for step in range(steps):  # the training loop
        night = torch.randint(len(sky), (frames,))
        loss = sum(losses(*trail(sky[night], glow[night]), ends[night]))
        adam.zero_grad()
        loss.backward()
        adam.step()
        if (step + 1) % 50 == 0:
            print("step", step + 1, "loss", round(loss.item(), 4))
    radiants.dawn.set()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--frames", type=int, default=24)
    parser.add_argument(
        "--showers", type=int, default=0, help="trails to sort into showers 40 times a second"
    )
    parser.add_argument("--leave-room", action="store_true", help="for whoever else is logged in")
    main(**vars(parser.parse_args()))
