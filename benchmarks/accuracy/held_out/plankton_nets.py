"""Sorts the catch of a tow net: silhouettes of plankton, photographed in a flow cell, into taxa.

The silhouettes lie in memory; a reader process crops them, and one network with separable filters
looks at them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, TAXA = 40, 9


@dataclass
class Settings:
    steps: int
    batch: int
    catch: int
    levels: int
    lamp_readings: int
    tidy: bool


def draw_catch(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Bodies with as many arms as their taxon says."""
    dice = np.random.default_rng(1846)
    grid = np.linspace(-1.2, 1.2, SIDE + 8)
    angle = np.arctan2(grid[:, None], grid[None, :])
    away = np.hypot(grid[:, None], grid[None, :])
    taxa = dice.integers(0, TAXA, count)
    turns = dice.uniform(0, 2 * np.pi, count)
    pictures = np.empty((count, SIDE + 8, SIDE + 8), dtype=np.uint8)
    for row in range(count):
        outline = 0.65 + 0.25 * np.cos((taxa[row] + 2) * angle + turns[row])
        glow = 1 / (1 + np.exp(14 * (away - outline)))
        pictures[row] = (glow * 210 + dice.uniform(0, 40, glow.shape)).astype(np.uint8)
    return pictures, taxa


class FlowCell(Dataset):
    def __init__(self, pictures: np.ndarray, taxa: np.ndarray):
        self.pictures, self.taxa = pictures, taxa

    def __len__(self) -> int:
        return len(self.taxa)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        top, left = np.random.randint(0, 9, 2)
        return self.pictures[row, top : top + SIDE, left : left + SIDE], int(self.taxa[row])


class Plate:
    """Lays silhouettes side by side, and may give all of a plate the same six shades."""

    def __init__(self, rounds: int):
        self.rounds = rounds

    def __call__(self, items):
        stack = np.stack([picture for picture, _ in items]).astype(np.float32) / 255
        if self.rounds:
            some = stack[:, ::2, ::2].ravel()
            shades = np.linspace(0.05, 0.95, 6, dtype=np.float32)
            for _ in range(self.rounds):
                nearest = np.searchsorted((shades[1:] + shades[:-1]) / 2, some)
                held = np.bincount(nearest, minlength=6)
                light = np.bincount(nearest, some, minlength=6)
                shades = np.where(held > 0, light / np.maximum(held, 1), shades).astype(np.float32)
                shades.sort()
            stack = shades[np.searchsorted((shades[1:] + shades[:-1]) / 2, stack)]
        return torch.from_numpy(stack)[:, None], torch.tensor([taxon for _, taxon in items])


class LampCurve:
    """Each reader measures the flow cell's lamp once before it reads."""

    def __init__(self, readings: int):
        self.readings = readings

    def __call__(self, reader: int) -> None:
        drawn = np.random.default_rng(reader).normal(1.0, 0.02, self.readings)
        self.curve = np.quantile(drawn, np.linspace(0, 1, 33)) if self.readings else None


def separable(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, inputs, 3, padding=1, groups=inputs, bias=False),
        nn.Conv2d(inputs, outputs, 1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
    )


def build() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        separable(16, 32),
        separable(32, 32),
        nn.MaxPool2d(2),
        separable(32, 64),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, TAXA),
    )


def main(settings: Settings) -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)
    reader = DataLoader(
        FlowCell(*draw_catch(settings.catch)),
        batch_size=settings.batch,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        collate_fn=Plate(settings.levels),
        worker_init_fn=LampCurve(settings.lamp_readings),
        persistent_workers=not settings.tidy,
        multiprocessing_context="fork",
    )
    network = build()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, fused=True)
    done = 0
    while done < settings.steps:
        for silhouettes, taxa in reader:  # the training loop
            loss = nn.functional.cross_entropy(network(silhouettes), taxa)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done % 50 == 0:
                print(f"after {done} plates: {loss.item():.3f}")
            if done == settings.steps:
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--catch", type=int, default=1200, help="silhouettes in the catch")
    parser.add_argument("--levels", type=int, default=0, help="rounds that look for a plate's shades")
    parser.add_argument("--lamp-readings", type=int, default=0, help="readings of the lamp at the outset")
    parser.add_argument(
        "--tidy", action="store_true", help="leave nothing behind when the catch is through"
    )
    main(Settings(**vars(parser.parse_args())))
