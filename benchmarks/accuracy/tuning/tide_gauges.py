"""Forecasts the level at a tide gauge for a day from the past week of level, pressure and wind."""

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

cli = argparse.ArgumentParser(description=__doc__)
cli.add_argument("--steps", type=int, default=200)
cli.add_argument("--batch", type=int, default=256)
cli.add_argument("--lr", type=float, default=5e-4)
cli.add_argument("--harmonics", type=int, default=0, help="random Fourier features beside the linear head")
cli.add_argument("--averages", type=int, default=0, help="weight averages, each with a decay of its own")
cli.add_argument("--alarms", type=int, default=0, help="flood levels whose hits and misses are counted")
opt = cli.parse_args()

PAST, LEAD, WIDTH = 168, 24, 384
torch.manual_seed(1953)

# twenty thousand hours: M2, S2, K1, O1 and a surge that follows pressure and wind
hour = torch.arange(20_000.0)
astronomic = torch.zeros_like(hour)
for period, height in [(12.4206, 1.2), (12.0, 0.4), (23.9345, 0.15), (25.8193, 0.12)]:
    astronomic += height * torch.cos(2 * math.pi * hour / period)
weather = F.avg_pool1d(torch.randn(3, 1, len(hour)) * 6, 25, stride=1, padding=12)[:, 0]
surge = 0.3 * weather[0] - 0.2 * weather[1]
series = torch.stack([astronomic + surge, *weather], 1)
past = series[:-LEAD].unfold(0, PAST, 1)
future = series[PAST:, 0].unfold(0, LEAD, 1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Harmonics(nn.Module):
    def __init__(self, width, amount, lead):
        super().__init__()
        directions = np.random.default_rng(3).normal(size=(width, amount)) / width**0.5
        self.register_buffer("directions", torch.from_numpy(directions))
        self.out = nn.Linear(amount, lead, dtype=torch.float64)

    def forward(self, x):
        return self.out(torch.cos(x.double() @ self.directions)).float()


class TideNet(nn.Module):
    def __init__(self, width, blocks, harmonics):
        super().__init__()
        self.stem = nn.Linear(4 * PAST, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(blocks)])
        self.head = nn.Linear(width, LEAD)
        self.harmonics = Harmonics(width, harmonics, LEAD) if harmonics else None

    def forward(self, x):
        x = self.blocks(self.stem(x.flatten(1)))
        level = self.head(x)
        if self.harmonics is not None:
            level = level + self.harmonics(x)
        return level


net = TideNet(WIDTH, 4, opt.harmonics)
adam = torch.optim.AdamW(net.parameters(), lr=opt.lr, fused=True)
decays = [1 - 2.0 ** -(4 + 0.25 * n) for n in range(opt.averages)]
shadows = [{name: value.clone() for name, value in net.state_dict().items()} for _ in decays]
flood_levels = torch.linspace(0.5, 2.0, opt.alarms).tolist() if opt.alarms else []
success = torch.zeros(LEAD)

for step in range(1, opt.steps + 1):  # the training loop
    rows = torch.randint(len(past), (opt.batch,))
    seen, wanted = past[rows], future[rows]
    level = net(seen)
    loss = F.smooth_l1_loss(level, wanted)
    adam.zero_grad()
    loss.backward()
    adam.step()

    for decay, shadow in zip(decays, shadows, strict=False):
        for name, value in net.state_dict().items():
            shadow[name] = decay * shadow[name] + (1 - decay) * value

    if flood_levels:
        forecast = level.detach()
        for lead in range(LEAD):
            index = 0.0
            for threshold in flood_levels:
                said = forecast[:, lead] > threshold
                came = wanted[:, lead] > threshold
                hits = (said & came).sum().item()
                misses = (~said & came).sum().item()
                alarms = (said & ~came).sum().item()
                index += hits / max(1, hits + misses + alarms)
            success[lead] = 0.95 * success[lead] + 0.05 * index / len(flood_levels)

    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}, success at 6 h {success[5].item():.2f}")
