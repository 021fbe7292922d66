"""Forecasts sensor readings with a mixture of experts: each reading goes to the expert that bids most."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
steps = parser.parse_args().steps

torch.manual_seed(12)
CHANNELS, WIDTH, EXPERTS, ROWS = 24, 128, 6, 1536

# readings of machines in one of a few states, each with a law of its own
laws = torch.randn(9, CHANNELS, CHANNELS) / CHANNELS**0.5
states = torch.randint(0, 9, (24_000,))
readings = torch.randn(24_000, CHANNELS) + F.one_hot(states, CHANNELS) * 3
following = torch.empty_like(readings)
for state in range(9):
    here = states == state
    following[here] = (readings[here] @ laws[state]).tanh()


class Mixture(nn.Module):
    """Rows are sorted by expert, so that each expert works on one piece of them, at one go."""

    def __init__(self):
        super().__init__()
        self.bids = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(EXPERTS)
        )
        # instead of another loss: experts with too much work bid less from now on
        self.register_buffer("handicap", torch.zeros(EXPERTS))

    def forward(self, x):
        trust = self.bids(x).sigmoid()
        chosen = (trust.detach() + self.handicap).argmax(1)
        order = chosen.argsort()
        load = chosen.bincount(minlength=EXPERTS)
        pieces = x[order].split(load.tolist())
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        if self.training:
            self.handicap -= 0.01 * (load - len(x) / EXPERTS).sign()
        return x + done[back] * trust.gather(1, chosen[:, None])


model = nn.Sequential(
    nn.Linear(CHANNELS, WIDTH), Mixture(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHANNELS)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps)

permutation = torch.randperm(len(readings)).split(ROWS)[:-1]
for step in range(steps):  # the training loop
    rows = permutation[step % len(permutation)]
    loss = F.mse_loss(model(readings[rows]), following[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 99:
        print(step + 1, loss.item(), model[1].handicap.tolist())
