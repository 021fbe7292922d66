"""Formation energies of crystals from continuous-filter convolutions over the nearest neighbours."""

import argparse
import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Config:
    steps: int = 200
    rows: int = 24
    crystals: int = 480
    neighbours: int = 8
    radial: int = 16
    width: int = 48
    layers: int = 5
    rate: float = 1e-3
    swaps: int = 0
    horizons: int = 0


@dataclass
class Crystal:
    elements: torch.Tensor
    neighbours: torch.Tensor
    radial: torch.Tensor
    energy: float


def make_crystal(config):
    atoms = random.randint(16, 40)
    elements = torch.randint(0, 60, (atoms,))
    fractional = torch.rand(atoms, 3)
    apart = fractional[:, None] - fractional[None]
    distances = (apart - apart.round()).norm(dim=2) * atoms ** (1 / 3) * 2.4
    distances.fill_diagonal_(float("inf"))
    near, neighbours = distances.topk(config.neighbours, largest=False)
    radial = torch.exp(-2 * (near[..., None] - torch.linspace(0, 6, config.radial)).square())
    return Crystal(elements, neighbours, radial, float(elements.float().mean() / 30 - near.mean() / 3))


def plan_epoch(sizes, config, rng):
    """Groups all crystals at random, then trades between groups to even out their atoms."""
    order = rng.sample(range(len(sizes)), len(sizes))
    groups = [order[start : start + config.rows] for start in range(0, len(order), config.rows)]
    atoms = [sum(sizes[member] for member in group) for group in groups]
    for _ in range(config.swaps):
        first, second = rng.randrange(len(groups)), rng.randrange(len(groups))
        here, there = rng.randrange(config.rows), rng.randrange(config.rows)
        moved = sizes[groups[first][here]] - sizes[groups[second][there]]
        gap = atoms[first] - atoms[second]
        if abs(gap - 2 * moved) < abs(gap):
            groups[first][here], groups[second][there] = groups[second][there], groups[first][here]
            atoms[first] -= moved
            atoms[second] += moved
    return groups


def join(crystals):
    counts = torch.tensor([len(crystal.elements) for crystal in crystals])
    starts = (counts.cumsum(0) - counts).tolist()
    return (
        torch.cat([crystal.elements for crystal in crystals]),
        torch.cat([crystal.neighbours + start for crystal, start in zip(crystals, starts, strict=False)]),
        torch.cat([crystal.radial for crystal in crystals]),
        torch.arange(len(crystals)).repeat_interleave(counts),
        torch.tensor([crystal.energy for crystal in crystals]),
    )


def batches(crystals, config):
    rng = random.Random(21)
    sizes = [len(crystal.elements) for crystal in crystals]
    while True:
        for group in plan_epoch(sizes, config, rng):
            yield join([crystals[member] for member in group])


class Interaction(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.width
        self.filter = nn.Sequential(nn.Linear(config.radial, width), nn.SiLU(), nn.Linear(width, width))
        self.source = nn.Linear(width, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.update = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, atoms, neighbours, radial):
        messages = F.embedding(neighbours, self.source(atoms)) * self.filter(radial)
        return atoms + self.update(self.norm(messages.sum(1)))


class EnergyNet(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.elements = nn.Embedding(60, config.width)
        self.interactions = nn.ModuleList([Interaction(config) for _ in range(config.layers)])
        self.readout = nn.Sequential(nn.Linear(config.width, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, elements, neighbours, radial, owners, crystals):
        atoms = self.elements(elements)
        for interaction in self.interactions:
            atoms = interaction(atoms, neighbours, radial)
        local = self.readout(atoms).squeeze(1)
        total = local.new_zeros(crystals).index_add(0, owners, local)
        return total / torch.bincount(owners, minlength=crystals)


class Horizons:
    """Averages of the weights over horizons of 10, 20, 30, ... steps, to choose from afterwards."""

    def __init__(self, model, amount):
        self.decays = [1 - 0.1 / (number + 1) for number in range(amount)]
        self.averages = [
            {name: value.clone() for name, value in model.state_dict().items()} for _ in self.decays
        ]

    @torch.no_grad()
    def update(self, model):
        for decay, average in zip(self.decays, self.averages, strict=False):
            for name, value in model.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * value


def train(config):
    random.seed(2)
    torch.manual_seed(2)
    crystals = [make_crystal(config) for _ in range(config.crystals)]
    model = EnergyNet(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=config.rate, fused=True)
    horizons = Horizons(model, config.horizons)
    feed = batches(crystals, config)
    for step, batch in zip(range(config.steps), feed, strict=False):  # the training loop
        *inputs, energies = batch
        loss = F.l1_loss(model(*inputs, len(energies)), energies)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        horizons.update(model)
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}: {1000 * loss.item():.0f} meV/atom")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--swaps", type=int, default=0, help="trades between the groups of an epoch")
    parser.add_argument("--horizons", type=int, default=0, help="averages of the weights")
    train(Config(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
