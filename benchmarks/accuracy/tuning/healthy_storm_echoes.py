"""Birds, insects or rain? Classifies radar echoes, whose batches are turned and blurred as they come."""

import argparse
import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

SIDE, KINDS = 48, 3


@dataclass
class Settings:
    steps: int = 200
    batch: int = 32
    rate: float = 8e-4
    scans: int = 1024


class Turn(nn.Module):
    """A random turn and zoom of each scan."""

    def forward(self, scans):
        angle = (torch.rand(len(scans)) * 2 - 1) * math.pi
        zoom = 0.9 + 0.2 * torch.rand(len(scans))
        cos, sin, none = zoom * angle.cos(), zoom * angle.sin(), torch.zeros(len(scans))
        theta = torch.stack([cos, -sin, none, sin, cos, none], 1).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(scans.shape), align_corners=False)
        return F.grid_sample(scans, grid, align_corners=False)


class Speckle(nn.Module):
    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def forward(self, scans):
        return torch.randn_like(scans).mul_(self.strength).add_(scans)


class Blockage(nn.Module):
    """Hides a square of each scan, as a hill or a tower would."""

    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, scans):
        corner = torch.randint(0, SIDE - self.size, (2, len(scans), 1))
        line = torch.arange(SIDE)
        within = (line >= corner) & (line < corner + self.size)
        return scans.masked_fill((within[0][:, :, None] & within[1][:, None])[:, None], 0.0)


class EchoNet(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = [(2, 32, 2), (32, 64, 2), (64, 96, 1)]
        self.convs = nn.ModuleList([nn.Conv2d(i, o, 3, s, padding=1, bias=False) for i, o, s in sizes])
        self.norms = nn.ModuleList([nn.BatchNorm2d(o) for _, o, _ in sizes])
        self.kind = nn.Linear(96, KINDS)

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = F.relu(norm(conv(x)))
        return self.kind(x.mean((2, 3)))


def make_scans(amount):
    """Reflectivity and speed: rain comes in patches, birds in rings, insects everywhere."""
    kind = torch.randint(0, KINDS, (amount,))
    line = torch.linspace(-1, 1, SIDE)
    radius = (line[:, None].square() + line.square()).sqrt()
    ring = torch.exp(-(((radius - 0.5) / 0.15) ** 2))
    patch = torch.exp(-(((radius - 0.2) / 0.25) ** 2))
    shapes = torch.stack([patch, ring, torch.ones(SIDE, SIDE) / 2])
    scans = torch.randn(amount, 2, SIDE, SIDE).mul_(0.3)
    scans[:, 0] += shapes[kind]
    return scans, kind


def train(settings):
    scans, kinds = make_scans(settings.scans)
    disturb = nn.Sequential(Turn(), Speckle(0.1), Blockage(10))
    model = EchoNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.rate * 40, momentum=0.9, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, settings.steps)
    for step in range(settings.steps):  # the training loop
        rows = torch.randint(0, settings.scans, (settings.batch,))
        with torch.no_grad():
            batch = disturb(scans[rows])
        loss = F.cross_entropy(model(batch), kinds[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        if step % 50 == 49:
            print(f"{step + 1} loss {loss.item():.3f} rate {schedule.get_last_lr()[0]:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Settings.steps)
    torch.manual_seed(15)
    train(Settings(steps=parser.parse_args().steps))
