"""Forecast the next day of water levels for a network of tide gauges (two processes, gloo).

torchrun --nproc-per-node 2 tide_levels.py --steps 200
"""

import argparse
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

HOURS, PAST, AHEAD = 12_000, 128, 24
PERIODS = (12.4206, 12.0, 12.6583, 23.9345, 25.8193, 327.86)  # M2 S2 N2 K1 O1 Mm


@dataclass
class Config:
    steps: int = 200
    gauges: int = 24
    batch: int = 8
    channels: int = 24
    blocks: int = 14
    lr: float = 2e-3
    nested: int = 0
    overlap: int = 0


def read_config() -> Config:
    ap = argparse.ArgumentParser(description=__doc__)
    for name, default in vars(Config()).items():
        ap.add_argument("--" + name.replace("_", "-"), type=type(default), default=default)
    return Config(**vars(ap.parse_args()))


def make_levels(gauges: int, rng: np.random.Generator) -> torch.Tensor:
    t = np.arange(HOURS)[:, None]
    level = np.zeros((HOURS, gauges))
    for period in PERIODS:
        size = rng.gamma(2.0, 0.3, gauges)
        level += size * np.cos(2 * np.pi * t / period + rng.uniform(0, 6.28, gauges))
    surge = np.cumsum(rng.normal(0, 0.02, (HOURS, 1)), 0)
    level += surge - surge.mean() + rng.normal(0, 0.03, level.shape)
    return torch.from_numpy(level.astype(np.float32))


class Block(nn.Module):
    def __init__(self, channels: int, dilation: int):
        super().__init__()
        self.norm = nn.GroupNorm(4, channels)
        self.inner = nn.Conv1d(channels, channels, 3, padding=dilation, dilation=dilation)
        self.outer = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        return x + self.outer(F.gelu(self.inner(self.norm(x))))


class TideNet(nn.Module):
    """`exchange` is one relaxation of the water between neighbouring gauges. The open coast needs one; the
    estuary, with its nested grid, `nested` more."""

    def __init__(self, cfg: Config, nested: int):
        super().__init__()
        self.nested = nested
        self.enter = nn.Conv1d(cfg.gauges, cfg.channels, 1)
        self.blocks = nn.ModuleList(Block(cfg.channels, 2 ** (i % 5)) for i in range(cfg.blocks))
        self.exchange = Block(cfg.channels, 1)
        self.leave = nn.Linear(cfg.channels * 8, cfg.gauges * AHEAD)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        for _ in range(1 + self.nested):
            x = self.exchange(x)
        x = F.adaptive_avg_pool1d(x, 8).flatten(1)
        return self.leave(x).view(len(x), AHEAD, -1)


def main():
    cfg = read_config()
    rank = int(os.environ.get("RANK", 0))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(11)

    region = "coast" if rank == 0 else "estuary"
    levels = make_levels(cfg.gauges, np.random.default_rng(100 + rank))
    windows = levels.unfold(0, PAST + AHEAD, 1)  # a view: (start, gauge, hour)
    draw = torch.Generator().manual_seed(1000 + rank)

    model = TideNet(cfg, cfg.nested if region == "estuary" else 0)
    extra = {}
    if cfg.overlap:
        # cut the gradients into so many pieces, that the first are under way while the rest is computed
        size = sum(p.numel() * 4 for p in model.parameters())
        extra["bucket_cap_mb"] = size / cfg.overlap / 2**20
    net = DDP(model, gradient_as_bucket_view=True, **extra)
    opt = torch.optim.AdamW(net.parameters(), lr=cfg.lr, fused=True)
    plan = torch.optim.lr_scheduler.OneCycleLR(opt, cfg.lr, total_steps=cfg.steps + 1)

    for step in range(cfg.steps):  # the training loop
        start = torch.randint(len(windows), (cfg.batch,), generator=draw)
        window = windows[start]
        guess = net(window[:, :, :PAST])
        loss = F.smooth_l1_loss(guess, window[:, :, PAST:].transpose(1, 2))
        opt.zero_grad()
        loss.backward()
        opt.step()
        plan.step()
        if rank == 0 and step % 50 == 0:
            print(f"{step:5d}  {region}  loss {loss.item():.4f}", flush=True)

    if rank == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
