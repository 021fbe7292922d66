"""Trains a denoising diffusion model on stamps of galaxies, and keeps an average of its weights."""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

CLOCK, TIMES = 64, 1000


def make_stamps(amount, side=32):
    grid = torch.linspace(-1, 1, side)
    y, x = grid[:, None], grid[None, :]
    angle = math.pi * torch.rand(amount, 1, 1)
    flat = 0.3 + 0.7 * torch.rand(amount, 1, 1)
    scale = 0.1 + 0.2 * torch.rand(amount, 1, 1)
    along = x * angle.cos() + y * angle.sin()
    across = (y * angle.cos() - x * angle.sin()) / flat
    light = torch.exp(-(along**2 + across**2).sqrt() / scale)
    return (2 * light - 1).unsqueeze(1)


class Stage(nn.Module):
    def __init__(self, inside, outside):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, outside), nn.GroupNorm(4, outside)
        self.clock = nn.Linear(CLOCK, outside)
        self.skip = nn.Conv2d(inside, outside, 1, bias=False)

    def forward(self, x, clock):
        h = F.silu(self.norm1(self.first(x)) + self.clock(clock)[:, :, None, None])
        return F.silu(self.norm2(self.second(h)) + self.skip(x))


class Denoiser(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.clock = nn.Sequential(nn.Linear(CLOCK, CLOCK), nn.SiLU())
        self.register_buffer("speeds", torch.exp(-math.log(1e4) * torch.arange(CLOCK // 2) / (CLOCK // 2)))
        self.down1, self.down2 = Stage(1, width), Stage(width, 2 * width)
        self.middle = Stage(2 * width, 4 * width)
        self.up2, self.up1 = Stage(6 * width, 2 * width), Stage(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x, times):
        angle = times[:, None] * self.speeds
        clock = self.clock(torch.cat([angle.sin(), angle.cos()], 1))
        fine = self.down1(x, clock)
        coarse = self.down2(F.avg_pool2d(fine, 2), clock)
        h = self.middle(F.avg_pool2d(coarse, 2), clock)
        h = self.up2(torch.cat([F.interpolate(h, scale_factor=2), coarse], 1), clock)
        h = self.up1(torch.cat([F.interpolate(h, scale_factor=2), fine], 1), clock)
        return self.out(h)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=180)
    args = parser.parse_args()
    torch.manual_seed(23)
    stamps = make_stamps(1024)
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.02, TIMES), 0)
    signal, blur = kept.sqrt(), (1 - kept).sqrt()
    model = Denoiser()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    for step in range(1, args.steps + 1):  # the training loop
        clean = stamps[torch.randint(len(stamps), (16,))]
        times = torch.randint(TIMES, (16,))
        noise = torch.randn_like(clean)
        noisy = signal[times].view(-1, 1, 1, 1) * clean + blur[times].view(-1, 1, 1, 1) * noise
        loss = F.mse_loss(model(noisy, times.float()), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        if step % 60 == 0:
            print(f"{step}: {loss.item():.4f}")


if __name__ == "__main__":
    main()
