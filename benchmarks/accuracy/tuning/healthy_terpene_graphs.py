"""Boiling points of made-up terpenes: message passing over dense adjacency, since all have 24 atoms."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATOMS, KINDS = 24, 12


@dataclass
class Molecules:
    atoms: Tensor
    bonds: Tensor
    boils: Tensor

    @classmethod
    def invent(cls, count: int) -> "Molecules":
        atoms = torch.randint(KINDS, (count, ATOMS))
        parent = (torch.rand(count, ATOMS - 1) * torch.arange(1, ATOMS)).long()  # a tree ...
        bonds = torch.zeros(count, ATOMS, ATOMS)
        bonds[:, 1:].scatter_(2, parent[:, :, None], 1.0)
        bonds = bonds + (torch.rand(count, ATOMS, ATOMS) < 0.01)  # ... with a ring or two
        bonds = ((bonds + bonds.transpose(1, 2)) > 0).float()
        bonds.diagonal(dim1=1, dim2=2).zero_()
        heavy = F.one_hot(atoms, KINDS).float() @ torch.linspace(-1, 1, KINDS)
        boils = heavy.mean(1) + (bonds @ heavy[:, :, None]).square().mean((1, 2))
        return cls(atoms, bonds / bonds.sum(2, keepdim=True).clamp(min=1), boils)

    def batches(self, size: int):
        while True:
            for rows in torch.randperm(len(self.atoms)).split(size):
                if len(rows) == size:
                    yield self.atoms[rows], self.bonds[rows], self.boils[rows]


class Message(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.own, self.others = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, bonds: Tensor) -> Tensor:
        y = self.norm(x)
        return x + F.relu(self.own(y) + torch.bmm(bonds, self.others(y)))


class Net(nn.Module):
    def __init__(self, dim: int = 128, rounds: int = 4):
        super().__init__()
        self.embed = nn.Embedding(KINDS, dim)
        self.rounds = nn.ModuleList(Message(dim) for _ in range(rounds))
        self.head = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, atoms: Tensor, bonds: Tensor) -> Tensor:
        x = self.embed(atoms)
        for message in self.rounds:
            x = message(x, bonds)
        return self.head(x.mean(1))[:, 0]


def train(steps: int, batch: int, rate: float) -> None:
    torch.manual_seed(12)
    supply = Molecules.invent(6000).batches(batch)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    total = torch.zeros(())
    for step in range(steps):  # the training loop
        atoms, bonds, boils = next(supply)
        loss = F.huber_loss(net(atoms, bonds), boils)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.detach()
        if step % 100 == 99:
            print(f"step {step + 1}: mean loss {total.item() / 100:.4f}")
            total.zero_()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-3)
    args = parser.parse_args()
    train(args.steps, args.batch, args.rate)
