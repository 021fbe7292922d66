"""Learns to take noise out of grain structures of alloys, as the core of a diffusion model."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F


class Denoiser(nn.Module):
    def __init__(self, narrow=24, wide=48):
        super().__init__()
        self.enter = nn.Conv2d(1, narrow, 3, padding=1)
        self.down = nn.Conv2d(narrow, wide, 3, stride=2, padding=1, bias=False)
        self.down_norm = nn.GroupNorm(8, wide)
        self.clock = nn.Sequential(nn.Linear(32, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.middle = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.middle_norm = nn.GroupNorm(8, wide)
        self.up = nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1, bias=False)
        self.up_norm = nn.GroupNorm(8, narrow)
        self.leave = nn.Conv2d(narrow, 1, 3, padding=1)
        self.register_buffer("waves", torch.exp(torch.linspace(0, math.log(200), 16)))

    def forward(self, x, time):
        angles = time[:, None] * self.waves
        clock = self.clock(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        fine = F.silu(self.enter(x))
        coarse = F.silu(self.down_norm(self.down(fine)) + clock)
        coarse = coarse + F.silu(self.middle_norm(self.middle(coarse)))
        fine = fine + F.silu(self.up_norm(self.up(coarse)))
        return self.leave(fine)


def grains(amount, side=32, seeds=12):
    axis = torch.linspace(0, 1, side)
    pixels = torch.cartesian_prod(axis, axis)
    nearest = torch.cdist(pixels.expand(amount, -1, -1), torch.rand(amount, seeds, 2)).argmin(2)
    shades = torch.rand(amount, seeds).gather(1, nearest)
    return (2 * shades - 1).view(amount, 1, side, side)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps

    torch.manual_seed(77)
    structures, held_out = grains(640), grains(16)
    model = Denoiser()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

    order, step = iter(()), 0
    while step < steps:  # the training loop
        rows = next(order, None)
        if rows is None:
            order = iter(torch.randperm(len(structures)).split(16))
            rows = next(order)
        clean = structures[rows]
        time = torch.rand(len(clean))
        signal = torch.cos(0.5 * math.pi * time)[:, None, None, None]
        noise = torch.randn_like(clean)
        noisy = signal * clean + (1 - signal.square()).sqrt() * noise
        loss = F.mse_loss(model(noisy, time), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 100 == 0:
            with torch.inference_mode():
                half = torch.full((len(held_out),), 0.5)
                noise = torch.randn_like(held_out)
                mixed = math.sqrt(0.5) * (held_out + noise)
                error = F.mse_loss(model(mixed, half), noise).item()
            print(f"{step}: training {loss.item():.4f}, held out {error:.4f}")
