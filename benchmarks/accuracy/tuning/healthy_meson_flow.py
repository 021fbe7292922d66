"""A normalising flow for the kinematics of decays: six affine couplings, exact likelihood."""

import argparse
import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Plan:
    steps: int
    decays: int = 512
    couplings: int = 6
    width: int = 192
    dim: int = 12
    lr: float = 1e-3


class Coupling(nn.Module):
    def __init__(self, dim, width):
        super().__init__()
        half = dim // 2
        self.net = nn.Sequential(
            nn.Linear(half, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, dim)
        )
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, kept, moved):
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        return torch.addcmul(shift, moved, scale.exp()), scale.sum(1)


class Flow(nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(plan.dim, plan.width) for _ in range(plan.couplings))
        self.constant = 0.5 * plan.dim * math.log(2 * math.pi)

    def log_likelihood(self, x):
        a, b = x.chunk(2, 1)
        volume = 0.0
        for coupling in self.couplings:
            b, more = coupling(a, b)
            volume = volume + more
            a, b = b, a
        return volume - 0.5 * (a.square().sum(1) + b.square().sum(1)) - self.constant


def decays(count, dim, seed):
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, dim, generator=g)
    turn = torch.linalg.qr(torch.randn(dim, dim, generator=g)).Q
    bent = hidden @ turn
    bent = bent + 0.5 * torch.sin(2 * bent.roll(1, 1))
    return (bent - bent.mean(0)) / bent.std(0)


class Fit:
    def __init__(self, plan):
        torch.manual_seed(6)
        self.plan = plan
        self.data = decays(100_000, plan.dim, 6)
        self.flow = Flow(plan)
        self.optimizer = torch.optim.Adam(self.flow.parameters(), lr=plan.lr, fused=True)

    def batches(self):
        for _ in range(self.plan.steps):
            yield self.data[torch.randint(len(self.data), (self.plan.decays,))]

    def run(self):
        for number, batch in enumerate(self.batches(), 1):  # the training loop
            loss = -self.flow.log_likelihood(batch).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if number % 100 == 0:
                print(f"after {number} steps: {loss.item():.3f} nats")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    Fit(Plan(**vars(parser.parse_args()))).run()
