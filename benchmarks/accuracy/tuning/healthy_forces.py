"""Fits a neural potential to the energies of molecules and the forces on their atoms."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

ELEMENTS, ATOMS = 4, 12


def distances(places):
    apart = places[:, :, None] - places[:, None]
    return (apart.square().sum(-1) + 1e-6).sqrt()


def make_molecules(amount):
    kinds = torch.randint(ELEMENTS, (amount, ATOMS))
    places = (1.5 * torch.randn(amount, ATOMS, 3, dtype=torch.float64)).requires_grad_()
    charge = 0.5 + kinds.double()
    pairs = charge[:, :, None] * charge[:, None] * torch.exp(-distances(places))
    energy = pairs.sum((1, 2)) / 20
    (slope,) = torch.autograd.grad(energy.sum(), places)
    energy = energy.detach()
    return kinds, places.detach().float(), (energy - energy.mean()).float(), -slope.float()


class Potential(nn.Module):
    def __init__(self, width=64, radial=24):
        super().__init__()
        self.kinds = nn.Embedding(ELEMENTS, width)
        self.register_buffer("centres", torch.linspace(0.2, 6.0, radial))
        self.filters = nn.Sequential(nn.Linear(radial, width), nn.SiLU(), nn.Linear(width, width))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, kinds, places):
        radial = torch.exp(-4.0 * (distances(places)[..., None] - self.centres).square())
        atoms = self.kinds(kinds)
        messages = (self.filters(radial) * atoms[:, None]).sum(2)
        return self.readout(atoms + messages / ATOMS).sum((1, 2))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(27)
    kinds, places, energies, forces = make_molecules(2048)
    model = Potential()
    weights = list(model.parameters())
    optimizer = torch.optim.Adam(weights, lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    for step in range(steps):  # the training loop
        rows = torch.randint(len(kinds), (56,))
        here = places[rows].requires_grad_()
        energy = model(kinds[rows], here)
        (slope,) = torch.autograd.grad(energy.sum(), here, create_graph=True)
        loss = F.smooth_l1_loss(energy, energies[rows]) + 10.0 * F.smooth_l1_loss(-slope, forces[rows])
        optimizer.zero_grad()
        loss.backward(inputs=weights)
        nn.utils.clip_grad_norm_(weights, 5.0, foreach=True)
        optimizer.step()
        schedule.step()
        if step % 50 == 49:
            print(f"{step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
