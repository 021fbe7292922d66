"""Learns what slabs are like inside when they leave a walking beam furnace, from zones and entry."""

import argparse
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

NODES, ZONES, FEATURES, GRADES = 16, 8, 24, 5
SETPOINTS = np.linspace(0.6, 1.0, ZONES) + 0.04 * np.arange(GRADES)[:, None]


@dataclass
class Config:
    steps: int
    substeps: int
    sweeps: int
    couples: int
    rows: int = 512
    rate: float = 1e-3


class SlabModel(nn.Module):
    def __init__(self, width=384, blocks=3):
        super().__init__()
        self.into = nn.Linear(FEATURES + ZONES, width)
        self.blocks = nn.ModuleList([self.block(width) for _ in range(blocks)])
        self.out = nn.Linear(width, NODES + 2)

    @staticmethod
    def block(width):
        return nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, slabs, zones):
        x = self.into(torch.cat([slabs, zones.expand(len(slabs), -1)], 1))
        for block in self.blocks:
            x = x + block(x)
        profile, conductivity, uptake = self.out(x).split([NODES, 1, 1], 1)
        return profile, 0.2 * torch.sigmoid(conductivity), torch.sigmoid(uptake)


def make_plant(amount=6000):
    slabs = torch.rand(amount, FEATURES)
    depth = torch.linspace(-1, 1, NODES)
    entry, soak, thickness = slabs[:, :1], 1 - torch.exp(-3 * slabs[:, 1:2]), slabs[:, 2:3]
    measured = entry + (1 - entry) * soak * (1 - 0.4 * thickness * (1 - depth**2))
    return slabs, measured + 0.01 * torch.randn_like(measured)


def rolling_plan(steps):
    rng = random.Random(11)
    grade = 0
    for _ in range(steps):
        if rng.random() < 0.1:
            grade = (grade + rng.randrange(1, GRADES)) % GRADES
        yield grade


def settle(setpoints, sweeps):
    roof = np.repeat(setpoints, 25)
    field = np.full((len(roof), len(roof)), setpoints.mean())
    field[0] = roof
    field[:, 0], field[:, -1] = setpoints[0], setpoints[-1]
    for _ in range(sweeps):
        field[1:-1, 1:-1] = 0.25 * (field[:-2, 1:-1] + field[2:, 1:-1] + field[1:-1, :-2] + field[1:-1, 2:])
    hearth = field[len(field) // 2].reshape(ZONES, -1).mean(1)
    return torch.from_numpy(0.5 * setpoints + 0.5 * hearth).float()


def soaked(slabs, zones, conductivity, uptake, substeps):
    profile = slabs[:, :1].expand(-1, NODES)
    gas = zones.mean()
    for _ in range(substeps):
        inner = profile[:, 2:] - 2 * profile[:, 1:-1] + profile[:, :-2]
        top = profile[:, 1:2] - profile[:, :1] + uptake * (gas - profile[:, :1])
        bottom = profile[:, -2:-1] - profile[:, -1:]
        profile = profile + conductivity * torch.cat([top, inner, bottom], 1)
    return profile


def record(folder, step, profile, couples):
    values = profile.detach().numpy()
    for couple in range(couples):
        slab, node = couple % len(values), couple % NODES
        with open(folder / f"couple_{couple:04d}.csv", "a") as file:
            file.write(f"{step},{slab},{node},{values[slab, node]:.4f}\n")


def train(config, folder):
    slabs, measured = make_plant()
    model = SlabModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.rate, fused=True)
    grade, zones = None, None
    for step, wanted in enumerate(rolling_plan(config.steps), 1):  # the training loop
        if wanted != grade:
            grade, zones = wanted, settle(SETPOINTS[wanted], config.sweeps)
        rows = torch.randint(len(slabs), (config.rows,))
        batch, truth = slabs[rows], measured[rows]
        profile, conductivity, uptake = model(batch, zones)
        loss = F.mse_loss(profile, truth)
        if config.substeps:
            reached = soaked(batch, zones, conductivity, uptake, config.substeps)
            loss = loss + 0.1 * F.mse_loss(reached, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if config.couples:
            record(folder, step, profile, config.couples)
        if step % 50 == 0:
            print(f"step {step}: grade {grade}, loss {loss.item():.5f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--substeps", type=int, default=0, help="of the conduction that slabs obey")
    parser.add_argument("--sweeps", type=int, default=0, help="over the gas field when the grade changes")
    parser.add_argument("--couples", type=int, default=0, help="thermocouples for the historian")
    args = parser.parse_args()
    torch.manual_seed(11)
    with tempfile.TemporaryDirectory() as folder:
        train(Config(args.steps, args.substeps, args.sweeps, args.couples), Path(folder))


if __name__ == "__main__":
    main()
