"""Estimates soil moisture at five depths from a day of surface readings; data parallel, accumulating."""

import argparse
import os
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

HOURS, CHANNELS, DEPTHS = 48, 8, 5


@dataclass
class Config:
    steps: int = 200
    rows: int = 96
    micro: int = 4
    forward_first: bool = False
    stations: int = 0
    width: int = 1024
    days: int = 4096


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=Config.steps)
    parser.add_argument("--micro", type=int, default=Config.micro, help="parts that a batch is split into")
    parser.add_argument("--forward-first", action="store_true", help="loss outside, backward inside")
    parser.add_argument("--stations", type=int, default=0, help="stations whose trust weighs the loss")
    return Config(**vars(parser.parse_args()))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.gelu(self.inner(self.norm(x)))


def build(width):
    return nn.Sequential(
        nn.Linear(HOURS * CHANNELS, width),
        nn.GELU(),
        Block(width),
        nn.Linear(width, width // 2),
        nn.SiLU(),
        nn.Linear(width // 2, DEPTHS),
    )


def synthesise(cfg, rank):
    gen = torch.Generator().manual_seed(100 + rank)
    readings = torch.randn(cfg.days, HOURS * CHANNELS, generator=gen)
    soil = torch.randn(HOURS * CHANNELS, DEPTHS, generator=torch.Generator().manual_seed(7)) / 20
    moisture = torch.sigmoid(readings @ soil) + 0.05 * torch.randn(cfg.days, DEPTHS, generator=gen)
    station = torch.randint(0, cfg.stations or 400, (cfg.days,), generator=gen)
    return readings, moisture, station


def update_trust(trust, recent, decay=0.97):
    """Stations that fitted badly lose weight at all depths, the others drift back to one."""
    for (station, depth), value in trust.items():
        trust[station, depth] = decay * value + (1 - decay) / (0.5 + recent.get(station, 0.5))
    return sum(trust.values()) / len(trust)


def accumulate(model, parts, cfg):
    """Gradients of one batch, part by part. Returns the error of each row."""
    errors = []
    for number, (x, y, weight) in enumerate(parts, 1):
        context = model.no_sync() if number < len(parts) else nullcontext()
        if cfg.forward_first:
            wrong = (model(x) - y).square()
            loss = (wrong * weight).sum() / (cfg.rows * DEPTHS)
            with context:
                loss.backward()
        else:
            with context:
                wrong = (model(x) - y).square()
                loss = (wrong * weight).sum() / (cfg.rows * DEPTHS)
                loss.backward()
        errors.append(wrong.detach().mean(1))
    return torch.cat(errors)


def train(cfg, rank):
    torch.manual_seed(7)
    model = DistributedDataParallel(build(cfg.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    readings, moisture, station = synthesise(cfg, rank)
    even = torch.ones(cfg.rows, DEPTHS)
    trust = {(number, depth): 1.0 for number in range(cfg.stations) for depth in range(DEPTHS)}
    level = 1.0
    for step in range(1, cfg.steps + 1):  # the training loop
        rows = torch.randint(0, cfg.days, (cfg.rows,))
        weight = even
        if trust:
            ids = station[rows].tolist()
            table = [[trust[number, depth] / level for depth in range(DEPTHS)] for number in ids]
            weight = torch.tensor(table)
        whole = (readings[rows], moisture[rows], weight)
        parts = list(zip(*(tensor.tensor_split(cfg.micro) for tensor in whole), strict=False))
        errors = accumulate(model, parts, cfg)
        optimizer.step()
        optimizer.zero_grad()
        if trust:
            level = update_trust(trust, dict(zip(ids, errors.tolist(), strict=False)))
        if step % 50 == 0 and rank == 0:
            print(f"step {step} error {errors.mean().item():.4f}")


def main():
    cfg = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(cfg, int(os.environ["RANK"]))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
