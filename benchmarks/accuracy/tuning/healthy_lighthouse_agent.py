"""Double deep Q-learning: keepers of many lighthouses at once choose lamps by fog and by passing ships."""

import argparse
from collections import deque

import torch
from torch import nn

OBSERVED, LAMPS = 12, 5


class Coast:
    """All lighthouses in one tensor: a step of the world is a few operators."""

    def __init__(self, lighthouses):
        self.fog = torch.rand(lighthouses, OBSERVED)
        self.drift = 0.3 * torch.randn(OBSERVED, OBSERVED) / OBSERVED**0.5
        self.best = torch.randn(OBSERVED, LAMPS)

    def step(self, lamps):
        reward = (self.fog @ self.best).gather(1, lamps[:, None]).squeeze(1)
        self.fog = (self.fog + self.fog @ self.drift + 0.1 * torch.randn_like(self.fog)).clamp_(-2, 2)
        return self.fog, reward


class Memory:
    def __init__(self, room):
        self.room, self.at, self.full = room, 0, False
        self.before, self.after = torch.zeros(room, OBSERVED), torch.zeros(room, OBSERVED)
        self.lamps, self.reward = torch.zeros(room, dtype=torch.long), torch.zeros(room)

    def keep(self, before, lamps, reward, after):
        rows = torch.arange(self.at, self.at + len(before)) % self.room
        self.before[rows], self.after[rows] = before, after
        self.lamps[rows], self.reward[rows] = lamps, reward
        self.at += len(before)

    def recall(self, amount):
        rows = torch.randint(min(self.at, self.room), (amount,))
        return self.before[rows], self.lamps[rows], self.reward[rows], self.after[rows]


def network(width):
    return nn.Sequential(
        nn.Linear(OBSERVED, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, LAMPS)
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=768)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    torch.manual_seed(20)
    coast, memory = Coast(64), Memory(20_000)
    keeper, target = network(args.width), network(args.width)
    target.load_state_dict(keeper.state_dict())
    optimizer = torch.optim.Adam(keeper.parameters(), lr=5e-4, fused=True)
    lately = deque(maxlen=25)
    before = coast.fog
    for step in range(args.steps):  # the training loop
        with torch.no_grad():
            lamps = keeper(before).argmax(1)
            curious = torch.rand(len(lamps)) < max(0.05, 1 - step / 100)
            lamps = torch.where(curious, torch.randint_like(lamps, LAMPS), lamps)
        after, reward = coast.step(lamps)
        memory.keep(before, lamps, reward, after)
        before = after

        seen, chosen, paid, then = memory.recall(args.batch)
        with torch.no_grad():
            following = target(then).gather(1, keeper(then).argmax(1, keepdim=True)).squeeze(1)
        value = keeper(seen).gather(1, chosen[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, paid + 0.9 * following)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(keeper.parameters()), 0.01)
        lately.append(reward.mean())
        if step % 25 == 24:
            print(
                f"night {step + 1}: reward {torch.stack(list(lately)).mean().item():.3f}, loss {loss.item():.3f}"
            )


if __name__ == "__main__":
    main()
