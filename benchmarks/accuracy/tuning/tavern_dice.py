"""Which dice to keep? Players of a tavern game learn by REINFORCE with a baseline, at many tables at once.

Each has five dice and a goal, may throw again whichever dice they like, once, and gets the points.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import json
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

GOALS = 10
KEEP = torch.tensor([[bool(choice >> die & 1) for die in range(5)] for choice in range(32)])


def points(dice, goal):
    counts = F.one_hot(dice, 6).sum(1)
    faces = counts * torch.arange(1, 7)
    total = faces.sum(1, keepdim=True)
    most = counts.amax(1, keepdim=True)
    full = (counts == 3).any(1, keepdim=True) & (counts == 2).any(1, keepdim=True)
    every = torch.cat([faces, total, total * (most >= 3), 25 * full, 50 * (most == 5)], 1)
    return every.gather(1, goal[:, None])[:, 0].float()


class Player(nn.Module):
    def __init__(self, width=384):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(30 + GOALS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.out = nn.Linear(width, 33)

    def forward(self, dice, goal):
        seen = torch.cat([F.one_hot(dice, 6).flatten(1), F.one_hot(goal, GOALS)], 1).float()
        choice, worth = self.out(self.body(seen)).split([32, 1], 1)
        return choice.log_softmax(1), worth[:, 0]


@dataclasses.dataclass(slots=True)
class Hand:
    dice: list
    kept: list
    points: float


class Ledger:
    """The last hands played, for the talk afterwards.

    We collect garbage by ourselves, at the end of a round, where it does no harm.
    """

    def __init__(self, size):
        gc.disable()
        gc.freeze()
        rng = np.random.default_rng(1)
        dice, kept = rng.integers(0, 6, (size, 5)).tolist(), rng.integers(0, 2, (size, 5)).tolist()
        self.hands = collections.deque((Hand(d, k, 0.0) for d, k in zip(dice, kept)), maxlen=size)

    def __call__(self, played):
        some = (played[name][:8].tolist() for name in ("dice", "kept", "gain"))
        self.hands.extend(map(Hand, *some))
        gc.collect()


class Chronicle:
    """What was played at the first tables, and how the player saw it; a line each."""

    def __init__(self, tables):
        self.tables = tables
        self.file = tempfile.NamedTemporaryFile("w", prefix="tavern_", suffix=".jsonl")

    def __call__(self, played):
        odds = played["odds"][: self.tables].double().round(decimals=3).tolist()
        dice = played["dice"][: self.tables].tolist()
        gain = played["gain"][: self.tables].tolist()
        for table in range(len(dice)):
            entry = {"table": table, "dice": dice[table], "odds": odds[table], "gain": gain[table]}
            print(json.dumps(entry), file=self.file, flush=True)


def play(player, optimizer, tables):
    """round after round; yields what was played"""
    while True:
        dice = torch.randint(6, (tables, 5)).sort(1).values
        goal = torch.randint(GOALS, (tables,))
        log_odds, worth = player(dice, goal)
        odds = log_odds.detach().exp()
        choice = torch.multinomial(odds, 1)
        kept = KEEP[choice[:, 0]]
        gain = points(torch.where(kept, dice, torch.randint(6, (tables, 5))), goal) / 10
        edge = gain - worth
        surprise = -log_odds.gather(1, choice)[:, 0]
        order = (log_odds.exp() * log_odds).sum(1).mean()
        loss = (surprise * edge.detach()).mean() + 0.5 * edge.square().mean() + 0.01 * order
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield {"dice": dice, "kept": kept, "odds": odds, "gain": gain}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tables", type=int, default=2048)
    parser.add_argument("--remember", type=int, default=0, help="keep so many hands for later")
    parser.add_argument("--tell", type=int, default=0, help="write down what was played at so many tables")
    args = parser.parse_args()
    torch.manual_seed(17)
    player = Player()
    optimizer = torch.optim.Adam(player.parameters(), lr=1e-3, fused=True)
    listeners = []
    if args.tell:
        listeners.append(Chronicle(args.tell))
    if args.remember:
        listeners.append(Ledger(args.remember))
    rounds = play(player, optimizer, args.tables)
    for number in range(args.steps):  # the training loop
        played = next(rounds)
        for listener in listeners:
            listener(played)
        if number % 50 == 49:
            print(f"round {number + 1}: {10 * played['gain'].mean().item():.2f} points")


if __name__ == "__main__":
    main()
