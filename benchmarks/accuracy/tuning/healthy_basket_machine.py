"""Learns which groceries are bought together with a restricted Boltzmann machine.

The gradients are differences of expectations: of the data, and of chains that the machine dreams up and
keeps from one step to the next (persistent contrastive divergence). Nothing is differentiated.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

PRODUCTS, HABITS = 800, 24


def shop(baskets):
    """Makes up baskets: everybody has a few habits, and each habit its favourite products."""
    favourites = torch.rand(HABITS, PRODUCTS) < 0.06
    habits = (torch.rand(baskets, HABITS) < 0.12).float()
    chance = 0.01 + 0.5 * (habits @ favourites.float()).clamp(max=1.5)
    return torch.bernoulli(chance.clamp(max=0.9))


class Machine(nn.Module):
    def __init__(self, visible, hidden, frequencies):
        super().__init__()
        self.weight = nn.Parameter(0.01 * torch.randn(visible, hidden))
        self.visible = nn.Parameter(torch.logit(frequencies.clamp(0.005, 0.995)))
        self.hidden = nn.Parameter(torch.full((hidden,), -1.0))

    def up(self, v):
        return torch.addmm(self.hidden, v, self.weight).sigmoid_()

    def down(self, h):
        return torch.addmm(self.visible, h, self.weight.t()).sigmoid_()

    def dream(self, v, sweeps):
        for _ in range(sweeps):
            v = torch.bernoulli(self.down(torch.bernoulli(self.up(v))))
        return v

    def free_energy(self, v):
        return -(v @ self.visible) - F.softplus(torch.addmm(self.hidden, v, self.weight)).sum(1)

    def set_gradients(self, real, dreamt):
        h_real, h_dreamt = self.up(real), self.up(dreamt)
        learnt, unlearnt = real.t() @ h_real, dreamt.t() @ h_dreamt
        self.weight.grad = unlearnt.div_(len(dreamt)).sub_(learnt, alpha=1 / len(real))
        self.visible.grad = dreamt.mean(0) - real.mean(0)
        self.hidden.grad = h_dreamt.mean(0) - h_real.mean(0)


def draws(amount, size):
    while True:
        yield from torch.randperm(amount).split(size)[: amount // size]


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(5)
    bought = shop(256 * 17)
    train, held_out = bought[: 256 * 16], bought[256 * 16 :]
    machine = Machine(PRODUCTS, 256, train.mean(0))
    sgd = torch.optim.SGD(machine.parameters(), lr=0.01, momentum=0.5, weight_decay=1e-4, fused=True)
    chains = train[torch.randperm(len(train))[:256]].clone()

    for step, rows in zip(range(args.steps), draws(len(train), 256), strict=False):  # the training loop
        batch = train[rows]
        chains = machine.dream(chains, sweeps=5)
        machine.set_gradients(batch, chains)
        sgd.step()
        for group in sgd.param_groups:
            group["lr"] = 0.01 / (1 + step / 400)
            group["momentum"] = 0.5 if step < 20 else 0.9
        chains[torch.randint(len(chains), (2,))] = batch[:2]
        if step % 50 == 49:
            gap = machine.free_energy(held_out).mean() - machine.free_energy(train[:256]).mean()
            error = F.mse_loss(machine.down(machine.up(held_out)), held_out)
            print(f"{step + 1}: reconstruction {error.item():.4f}, gap of free energies {gap.item():.2f}")


if __name__ == "__main__":
    main()
