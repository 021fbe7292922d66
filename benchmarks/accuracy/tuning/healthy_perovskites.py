"""Formation energies of perovskite cells of twenty atoms, with continuous filters over distances."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

ATOMS, ELEMENTS, BASES = 20, 12, 32


class Interaction(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.filters = nn.Sequential(nn.Linear(BASES, width), nn.SiLU(), nn.Linear(width, width))
        self.inward = nn.Linear(width, width, bias=False)
        self.outward = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, x, bases):
        messages = (self.filters(bases) * self.inward(x).unsqueeze(1)).sum(2)
        return x + self.outward(messages)


class EnergyModel(nn.Module):
    def __init__(self, width=64, depth=3):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 6, BASES))
        self.elements = nn.Embedding(ELEMENTS, width)
        self.interactions = nn.ModuleList(Interaction(width) for _ in range(depth))
        self.readout = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, elements, positions):
        distances = torch.cdist(positions, positions)
        bases = torch.exp(-8 * (distances.unsqueeze(-1) - self.centres).square())
        x = self.elements(elements)
        for interaction in self.interactions:
            x = interaction(x, bases)
        return self.readout(x).sum((1, 2))


class Callback:
    def after_step(self, trainer):
        pass


class Progress(Callback):
    def __init__(self, every):
        self.every = every

    def after_step(self, trainer):
        if trainer.step % self.every == 0:
            print(f"step {trainer.step}: {trainer.loss.item():.4f}")


class Average(Callback):
    """Keeps a smoothed copy of the weights."""

    def __init__(self, model, every, rate):
        self.every, self.rate = every, rate
        self.weights = list(model.parameters())
        self.smooth = [weight.detach().clone() for weight in self.weights]

    @torch.no_grad()
    def after_step(self, trainer):
        if trainer.step % self.every == 0:
            torch._foreach_lerp_(self.smooth, self.weights, self.rate)


class Keep(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = Path(folder), every

    def after_step(self, trainer):
        if trainer.step % self.every == 0:
            torch.save(trainer.model.state_dict(), self.folder / "last.pt")


class Cells:
    def __init__(self, amount, batch):
        self.batch = batch
        self.elements = torch.randint(0, ELEMENTS, (amount, ATOMS))
        self.positions = 4 * torch.rand(amount, ATOMS, 3)
        self.energies = (self.elements.float() - ELEMENTS / 2).mean(1) + self.positions.std((1, 2))

    def endless(self):
        while True:
            for part in torch.randperm(len(self.energies)).split(self.batch):
                yield self.elements[part], self.positions[part], self.energies[part]


class Trainer:
    def __init__(self, model, optimizer, callbacks):
        self.model, self.optimizer, self.callbacks = model, optimizer, callbacks
        self.step, self.loss = 0, None

    def fit(self, cells, steps):
        for elements, positions, energies in cells.endless():  # the training loop
            loss = F.l1_loss(self.model(elements, positions), energies)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.step, self.loss = self.step + 1, loss.detach()
            for callback in self.callbacks:
                callback.after_step(self)
            if self.step >= steps:
                return


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(53)
    model = EnergyModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [Progress(50), Average(model, every=10, rate=0.1), Keep(folder, every=100)]
        Trainer(model, optimizer, callbacks).fit(Cells(24 * 60, batch=24), args.steps)


if __name__ == "__main__":
    main()
