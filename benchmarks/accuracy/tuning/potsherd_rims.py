"""From the rim of a potsherd to the pot: its diameter, its height and its period."""

import argparse
import math

import numpy as np
import torch
from torch import nn

POINTS, PERIODS = 48, 7


class Excavation:
    """Profiles of rims, as drawn by hand on paper and traced."""

    def __init__(self, count, seed):
        rng = np.random.default_rng(seed)
        self.period = rng.integers(0, PERIODS, count)
        self.measure = rng.uniform(0.5, 2.0, (count, 2)).astype(np.float32)
        along = np.linspace(0, 1, POINTS)
        bend = np.sin(np.outer(1 + self.period, along * math.pi)) * self.measure[:, :1]
        rise = along * self.measure[:, 1:]
        drawn = np.stack([bend, rise], 2) + rng.normal(0, 0.03, (count, POINTS, 2))
        self.drawn = drawn.astype(np.float32)

    def __len__(self):
        return len(self.drawn)


def held_askew(profile, rng):
    """The same rim, not held quite upright, and traced again at even distances."""
    angle = rng.normal(0, 0.02)
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], np.float32)
    profile = profile @ turn
    way = np.concatenate([[0], np.cumsum(np.hypot(*np.diff(profile, axis=0).T))])
    even = np.linspace(0, way[-1], POINTS)
    return np.stack([np.interp(even, way, profile[:, 0]), np.interp(even, way, profile[:, 1])], 1)


class Table:
    """Where the finds are laid out for the next step."""

    def __init__(self, site, size, askew):
        self.site, self.size, self.askew = site, size, askew
        self.rng = np.random.default_rng(1)

    def __iter__(self):
        while True:
            rows = self.rng.integers(0, len(self.site), self.size)
            drawn = self.site.drawn[rows]
            for number in range(self.askew):
                row = number % self.size
                drawn[row] = held_askew(drawn[row], self.rng)
            yield (
                torch.from_numpy(drawn).flatten(1),
                torch.from_numpy(self.site.measure[rows]),
                torch.from_numpy(self.site.period[rows]),
            )


class Pot(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Linear(2 * POINTS, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.measure, self.period = nn.Linear(width, 2), nn.Linear(width, PERIODS)

    def forward(self, profile):
        x = self.stem(profile)
        for norm, hidden in zip(self.norms, self.hidden):
            x = x + torch.relu(hidden(norm(x)))
        return self.measure(x), self.period(x)


class Archaeologist:
    def __init__(self, pot, portions):
        self.pot, self.portions = pot, portions
        self.optimizer = torch.optim.AdamW(pot.parameters(), lr=5e-4, fused=True)
        self.cosine = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 1000)

    def lose(self, profile, measure, period):
        guess, scores = self.pot(profile)
        return nn.functional.mse_loss(guess, measure) + nn.functional.cross_entropy(scores, period)

    def learn(self, finds):
        """One step; in portions, as the laptop at the dig has little memory."""
        self.optimizer.zero_grad()
        whole = len(finds[0])
        share = math.ceil(whole / self.portions)
        total = torch.zeros(())
        for portion in zip(*(find.split(share) for find in finds)):
            loss = self.lose(*portion) * (len(portion[0]) / whole)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.cosine.step()
        return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--finds", type=int, default=128, help="sherds in a step")
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--askew", type=int, default=0, help="how many rims are picked up anew and traced")
    parser.add_argument("--portions", type=int, default=1, help="portions in which a step takes its finds")
    options = parser.parse_args()
    torch.manual_seed(1)
    table = Table(Excavation(6000, 0), options.finds, options.askew)
    digger = Archaeologist(Pot(options.width), options.portions)
    for number, finds in zip(range(1, options.steps + 1), table):  # the training loop
        lost = digger.learn(finds)
        if number % 50 == 0:
            print(f"{number}: {lost.item():.3f}")
