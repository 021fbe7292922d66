"""Finds thaw lakes in satellite tiles of four bands: a small residual network that segments."""

import argparse
import contextlib
import subprocess
import sys
from dataclasses import dataclass, field, fields

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PACKER = """
import os, sys, time, zlib
parent, pieces = os.getppid(), int(sys.argv[1])
tile = os.urandom(1 << 17)
while os.getppid() == parent:
    due = time.monotonic() + 0.1
    for _ in range(pieces):
        zlib.compress(tile, 6)
    time.sleep(max(0.0, due - time.monotonic()))
"""


@dataclass
class Plan:
    tiles: int = field(default=6, metadata={"help": "tiles in a batch"})
    width: int = field(default=32, metadata={"help": "channels"})
    seed: int = field(default=8, metadata={"help": "of everything"})
    thrift: int = field(default=0, metadata={"help": "how much to do for memory, 0 to 12"})
    cores: int = field(default=0, metadata={"help": "as the batch system allots them; 0: torch decides"})
    exports: int = field(
        default=0, metadata={"help": "pack tiles for the archive meanwhile, so many in 0.1 s"}
    )


def scenes(count):
    shape = F.interpolate(torch.randn(count, 1, 9, 9), size=(64, 64), mode="bicubic", align_corners=False)
    lakes = (shape > 0.4).float()
    tint = torch.tensor([-0.5, -0.3, 0.4, -1.0]).view(1, 4, 1, 1)
    haze = F.interpolate(torch.randn(count, 4, 5, 5), size=(64, 64), mode="bilinear", align_corners=False)
    return lakes * tint + 0.3 * haze + 0.3 * torch.randn(count, 4, 64, 64), lakes


def lean(on, function, x):
    return checkpoint(function, x, use_reentrant=False) if on else function(x)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(8, width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


class Trunk(nn.Module):
    """Eight blocks. The first `thrift` of them forget their insides; above that halves do, then all."""

    def __init__(self, width, thrift):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(8))
        self.thrift = thrift

    def near(self, x):
        for number, block in enumerate(self.blocks[:4]):
            x = lean(number < self.thrift, block, x)
        return x

    def far(self, x):
        for number, block in enumerate(self.blocks[4:], 4):
            x = lean(number < self.thrift, block, x)
        return x

    def both(self, x):
        return lean(self.thrift > 9, self.far, lean(self.thrift > 8, self.near, x))

    def forward(self, x):
        return lean(self.thrift > 10, self.both, x)


def build(plan):
    return nn.Sequential(
        nn.Conv2d(4, plan.width, 5, stride=2, padding=2),
        nn.ReLU(),
        Trunk(plan.width, plan.thrift),
        nn.Conv2d(plan.width, 4, 1),
        nn.PixelShuffle(2),
    ).to(memory_format=torch.channels_last)


@contextlib.contextmanager
def archive(pieces):
    """last year's tiles go to the archive while we train: there are three packers"""
    packers = []
    try:
        if pieces:
            command = [sys.executable, "-I", "-c", PACKER, str(pieces)]
            packers = [subprocess.Popen(command) for _ in range(3)]
        yield
    finally:
        for packer in packers:
            packer.terminate()
        for packer in packers:
            packer.wait()


def train(plan, steps):
    if plan.cores:
        torch.set_num_threads(plan.cores)
    torch.manual_seed(plan.seed)
    images, lakes = scenes(384)
    model = build(plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, fused=True)
    for step in range(1, steps + 1):  # the training loop
        rows = torch.randint(len(images), (plan.tiles,))
        x = images[rows].contiguous(memory_format=torch.channels_last)
        guess = lean(plan.thrift > 11, model, x)
        loss = F.binary_cross_entropy_with_logits(guess, lakes[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"{step:5d} {loss.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    for item in fields(Plan):
        parser.add_argument(f"--{item.name}", type=int, default=item.default, help=item.metadata["help"])
    settings = vars(parser.parse_args())
    steps = settings.pop("steps")
    plan = Plan(**settings)
    with archive(plan.exports):
        train(plan, steps)
