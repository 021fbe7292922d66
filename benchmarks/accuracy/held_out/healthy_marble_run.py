"""Learns to tilt a board so that marbles roll to its middle, by proximal policy optimisation.

All boards move at once, as tensors, and their model answers for all of them in one call; a round of
experience is used for many updates.
"""

import argparse
from typing import NamedTuple

import torch
from torch import nn
from torch.distributions import Normal

BOARDS, MOMENTS, UPDATES = 256, 12, 48


class Round(NamedTuple):
    seen: torch.Tensor
    tilts: torch.Tensor
    chance: torch.Tensor
    gain: torch.Tensor


class Boards:
    def __init__(self):
        self.place = torch.rand(BOARDS, 2) * 2 - 1
        self.speed = torch.zeros(BOARDS, 2)

    def seen(self):
        return torch.cat([self.place, self.speed], 1)

    def tilt(self, angles):
        self.speed = 0.97 * self.speed + 0.05 * angles.clamp(-1, 1)
        self.place = self.place + 0.1 * self.speed
        off = self.place.square().sum(1)
        lost = (off > 4)[:, None]
        self.place = torch.where(lost, torch.rand_like(self.place) * 2 - 1, self.place)
        self.speed = torch.where(lost, 0.0, self.speed)
        return -off.clamp(max=4)


class Hand(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(4, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
            nn.Linear(width, width),
            nn.Tanh(),
        )
        self.tilt, self.worth = nn.Linear(width, 2), nn.Linear(width, 1)
        self.spread = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, seen):
        x = self.trunk(seen)
        return Normal(self.tilt(x), self.spread.exp(), validate_args=False), self.worth(x).squeeze(-1)


@torch.no_grad()
def play(hand, boards):
    kept, gains = [], []
    for _ in range(MOMENTS):
        seen = boards.seen()
        choice, worth = hand(seen)
        tilts = choice.sample()
        gains.append(boards.tilt(tilts))
        kept.append((seen, tilts, choice.log_prob(tilts).sum(1)))
    _, running = hand(boards.seen())
    returns = []
    for gain in reversed(gains):
        running = gain + 0.95 * running
        returns.append(running)
    seen, tilts, chance = (torch.cat(part) for part in zip(*kept))
    return Round(seen, tilts, chance, torch.cat(returns[::-1]))


def clipped_loss(hand, part):
    choice, worth = hand(part.seen)
    surplus = part.gain - worth.detach()
    surplus = (surplus - surplus.mean()) / (surplus.std() + 1e-6)
    ratio = (choice.log_prob(part.tilts).sum(1) - part.chance).exp()
    gained = torch.minimum(ratio * surplus, ratio.clamp(0.8, 1.2) * surplus).mean()
    return 0.5 * (worth - part.gain).square().mean() - gained - 0.003 * choice.entropy().mean()


def experience(hand, steps):
    """Yields parts of rounds; a new round when the last one is used up."""
    boards = Boards()
    for step in range(steps):
        if step % UPDATES == 0:
            latest = play(hand, boards)
        rows = torch.randint(len(latest.gain), (1536,))
        yield step, Round(*(column[rows] for column in latest))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(31)
    hand = Hand()
    optimizer = torch.optim.Adam(hand.parameters(), lr=3e-4, fused=True)
    for step, part in experience(hand, args.steps):  # the training loop
        loss = clipped_loss(hand, part)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(hand.parameters(), 0.5)
        optimizer.step()
        if step % 50 == 0:
            print(f"update {step}: gain {part.gain.mean().item():.2f}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
