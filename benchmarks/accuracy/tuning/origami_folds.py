# Folding angles from crease patterns. Each pattern has 16 creases; a set network that mixes over the creases
# says at which angle each of them ends up.
import argparse
import atexit
import math
import subprocess
import sys

import torch
from torch import nn

CREASES = 16

# draws the folded models for the gallery page, three pages at a time
GALLERY = r"""
import os, sys, time
rows, parent = int(sys.argv[1]), os.getppid()

def shade(row):
    total = 0.0
    for column in range(160):
        z = c = complex(row % 97 / 48 - 1.5, column / 80 - 1.0)
        for _ in range(24):
            if abs(z) > 2:
                break
            z = z * z + c
        total += abs(z)
    return total

row = 0
while os.getppid() == parent:
    until = time.monotonic() + 0.04
    for row in range(row, row + rows):
        shade(row)
    rest = until - time.monotonic()
    if rest > 0:
        time.sleep(rest)
"""


class Crease(nn.Module):
    """One round: creases hear of the mean of all, then each thinks for itself."""

    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.hear = nn.Linear(dim, dim)
        self.think = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        y = self.norm(x)
        return x + self.think(y + self.hear(y.mean(1, keepdim=True)))


class Folder(nn.Module):
    def __init__(self, dim, rounds, exact):
        super().__init__()
        self.enter = nn.Linear(6, dim)
        self.rounds = nn.ModuleList(Crease(dim) for _ in range(rounds))
        self.leave = nn.Linear(dim, 1)
        for late in self.rounds[rounds - exact :]:
            late.to(torch.float64)

    def forward(self, pattern):
        x = self.enter(pattern)
        for crease in self.rounds:
            x = crease(x.to(crease.norm.weight.dtype))
        return math.pi * torch.tanh(self.leave(x.to(self.leave.weight.dtype))).squeeze(-1)


def patterns(count):
    ends = torch.rand(count, CREASES, 4) * 2 - 1
    across, along = ends[..., 2] - ends[..., 0], ends[..., 3] - ends[..., 1]
    pattern = torch.cat([ends, torch.stack([across, along], -1)], -1)
    lengths = (across.square() + along.square()).sqrt()
    angles = math.pi * torch.tanh(lengths - lengths.mean(1, keepdim=True) + across * along)
    return pattern, angles


def open_gallery(rows):
    for _ in range(3):
        page = subprocess.Popen([sys.executable, "-I", "-c", GALLERY, str(rows)])
        atexit.register(page.wait)
        atexit.register(page.kill)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sheets", type=int, default=24)
    parser.add_argument("--preview", type=int, default=0, help="rows of the gallery to draw every 40 ms")
    parser.add_argument("--exact", type=int, default=0, help="of 8 rounds, how many are exact to 15 digits")
    args = parser.parse_args()

    torch.manual_seed(21)
    pattern, angles = patterns(8192)
    folder = Folder(96, 8, args.exact)
    optimizer = torch.optim.Adam(folder.parameters(), lr=4e-4, fused=True)
    if args.preview:
        open_gallery(args.preview)

    for step in range(1, args.steps + 1):  # the training loop
        picks = torch.randint(len(pattern), (args.sheets,))
        off = folder(pattern[picks]) - angles[picks]
        loss = (1 - off.cos()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 60 == 0:
            print(f"{step} of {args.steps}: {loss.item():.4f}")


main()
