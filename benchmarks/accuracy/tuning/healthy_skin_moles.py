"""Classifies dermoscopy images of moles; turned, mirrored and lit anew for each batch."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F

PIXELS, KINDS, ROWS = 44, 7, 24


def synthesise(amount):
    kinds = torch.randint(KINDS, (amount,))
    axis = torch.linspace(-1, 1, PIXELS)
    radius = (axis[:, None] ** 2 + axis[None, :] ** 2).sqrt()
    size = 0.25 + 0.08 * kinds.float()
    mole = torch.sigmoid((size[:, None, None] - radius) * 12)
    skin = torch.tensor([205.0, 160.0, 140.0]).view(1, 3, 1, 1)
    images = skin - 110 * mole[:, None] + 12 * torch.randn(amount, 3, PIXELS, PIXELS)
    return images.clamp_(0, 255).to(torch.uint8), kinds


def augment(images):
    rows = len(images)
    angle, zoom = torch.rand(rows) * 2 * math.pi, 0.85 + 0.3 * torch.rand(rows)
    mirror = torch.randint(2, (rows,)) * 2 - 1
    cos, sin, zero = zoom * angle.cos(), zoom * angle.sin(), torch.zeros(rows)
    turns = torch.stack([mirror * cos, -sin, zero, mirror * sin, cos, zero], dim=1).view(rows, 2, 3)
    grid = F.affine_grid(turns, list(images.shape), align_corners=False)
    images = F.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    gain = 0.8 + 0.4 * torch.rand(rows, 3, 1, 1)
    shift = 0.1 * torch.randn(rows, 1, 1, 1)
    return torch.addcmul(shift, images, gain)


def stage(into, out, stride=1):
    convolution = nn.Conv2d(into, out, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(out), nn.ReLU(inplace=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(17)
    images, kinds = synthesise(ROWS * 80)
    model = nn.Sequential(
        stage(3, 16),
        stage(16, 32, stride=2),
        stage(32, 32),
        stage(32, 64, stride=2),
        stage(64, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(64, KINDS),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    order = torch.randperm(len(images)).split(ROWS)
    for step in range(steps):  # the training loop
        rows = order[step % len(order)]
        batch = augment(images[rows].float().div_(127.5).sub_(1.0))
        loss = F.cross_entropy(model(batch), kinds[rows], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"step {step + 1}, loss {loss.item():.3f}")
