"""Estimates the height and the biomass of forest plots from their lidar returns, on two ranks."""

import argparse
import math
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

POINTS = 128
TALLEST = 40.0


@dataclass(frozen=True)
class Config:
    steps: int
    plots: int
    rows: int
    surplus: int
    echoes: int
    bands: int
    rate: float


def parse() -> Config:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--plots", type=int, default=1024, help="of each rank")
    parser.add_argument("--rows", type=int, default=24, help="plots in a batch of a rank")
    parser.add_argument("--surplus", type=int, default=0, help="plots more in those of the first rank")
    parser.add_argument("--echoes", type=int, default=0, help="of each plot that the second flight took")
    parser.add_argument("--bands", type=int, default=0, help="of height, whose errors are reported apart")
    parser.add_argument("--rate", type=float, default=1e-3)
    return Config(**vars(parser.parse_args()))


def georeferenced(echoes: np.ndarray, heading: float) -> np.ndarray:
    placed = []
    for distance, azimuth, zenith in echoes.tolist():
        flat = distance * math.sin(zenith)
        height = 30.0 - distance * math.cos(zenith)
        placed.append((flat * math.cos(azimuth + heading), flat * math.sin(azimuth + heading), height))
    return np.array(placed, dtype=np.float32)


class Plots(Dataset):
    """Plots of one flight: points of (x, y, height, intensity), and what was measured on the ground."""

    def __init__(self, amount: int, seed: int, echoes: int = 0):
        rng = np.random.default_rng(seed)
        tops = rng.uniform(2.0, TALLEST, amount).astype(np.float32)
        self.points = rng.random((amount, POINTS, 4), dtype=np.float32)
        self.points[:, :, 2] *= tops[:, None] / 10
        self.truth = np.stack([tops / 10, tops**1.5 / 100], 1).astype(np.float32)
        self.raw = rng.random((amount, echoes, 3), dtype=np.float32) if echoes else None

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int):
        points = self.points[index]
        if self.raw is not None:
            placed = georeferenced(self.raw[index], random.uniform(0, math.tau))[:POINTS]
            points = points.copy()
            points[: len(placed), :2] = placed[:, :2]
        return torch.from_numpy(points), torch.from_numpy(self.truth[index])


class PointSet(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(4, 64),
            nn.GELU(),
            nn.Linear(64, 128),
            nn.LayerNorm(128),
            nn.GELU(),
            nn.Linear(128, 128),
            nn.GELU(),
            nn.Linear(128, 256),
        )
        self.all = nn.Sequential(nn.Linear(512, 128), nn.GELU(), nn.Linear(128, 2))

    def forward(self, points):
        seen = self.each(points)
        return self.all(torch.cat([seen.amax(1), seen.mean(1)], 1))


def endless(loader):
    while True:
        yield from loader


def make_batches(config: Config, rank: int):
    plots = Plots(config.plots, seed=100 + rank, echoes=config.echoes if rank == 1 else 0)
    rows = config.rows + (config.surplus if rank == 0 else 0)
    return endless(DataLoader(plots, batch_size=rows, shuffle=True, drop_last=True))


def band_errors(guess, truth, bands: int):
    """Sums of the errors over both ranks, by the height of the plot."""
    off = (guess - truth)[:, 0].abs()
    band = (truth[:, 0] * (10 / TALLEST) * bands).long().clamp(0, bands - 1)
    sums = torch.zeros(bands).index_add_(0, band, off)
    for number in range(bands):
        dist.all_reduce(sums[number : number + 1])
    return sums


def train(config: Config, rank: int) -> None:
    model = DistributedDataParallel(PointSet())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    batches = make_batches(config, rank)
    errors = torch.zeros(config.bands)
    for step in range(1, config.steps + 1):  # the training loop
        points, truth = next(batches)
        guess = model(points)
        loss = nn.functional.smooth_l1_loss(guess, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if config.bands:
            errors += band_errors(guess.detach(), truth, config.bands)
        if rank == 0 and step % 50 == 0:
            worst = f", worst band {int(errors.argmax())}" if config.bands else ""
            print(f"step {step}: loss {loss.item():.4f}{worst}", flush=True)


def main() -> None:
    config = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(8 + dist.get_rank())
    train(config, dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
