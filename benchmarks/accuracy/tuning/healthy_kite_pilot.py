"""Q-learning for a kite that has to stay in the wind window: 96 kites fly at once, one tick per update."""

import argparse
import math

import torch
from torch import nn


class Kites:
    def __init__(self, count):
        self.state = torch.randn(count, 6) * 0.1

    @torch.no_grad()
    def tick(self, action):
        s = self.state
        pull = (action.float() - 4.0) / 4.0
        speed = 0.98 * s[:, 3:] + 0.05 * torch.stack([pull, -s[:, 0], pull * s[:, 1]], 1)
        after = torch.cat([s[:, :3] + 0.1 * speed, speed], 1)
        crashed = after[:, :3].abs().amax(1) > 2.0
        reward = 1.0 - after[:, :3].square().sum(1)
        fresh = torch.where(crashed[:, None], torch.zeros_like(after), after)
        self.state = fresh
        return s, reward, after, crashed


class Replay:
    def __init__(self, size):
        self.size, self.at = size, 0
        self.before, self.after = torch.zeros(size, 6), torch.zeros(size, 6)
        self.action, self.reward, self.over = (
            torch.zeros(size, dtype=torch.long),
            torch.zeros(size),
            torch.zeros(size),
        )
        self.filled = 0

    def put(self, before, action, reward, after, over):
        n = len(before)
        here = slice(self.at, self.at + n)
        self.before[here], self.action[here], self.reward[here] = before, action, reward
        self.after[here], self.over[here] = after, over.float()
        self.at = (self.at + n) % self.size
        self.filled = min(self.filled + n, self.size)

    def draw(self, n):
        i = torch.randint(self.filled, (n,))
        return self.before[i], self.action[i], self.reward[i], self.after[i], self.over[i]


def network():
    return nn.Sequential(
        nn.Linear(6, 384),
        nn.ReLU(),
        nn.Linear(384, 384),
        nn.ReLU(),
        nn.Linear(384, 384),
        nn.ReLU(),
        nn.Linear(384, 9),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(21)

    q, target = network(), network()
    target.load_state_dict(q.state_dict())
    weights, shadows = list(q.parameters()), list(target.parameters())
    optimizer = torch.optim.Adam(weights, lr=3e-4, fused=True)
    kites, replay = Kites(96), Replay(96 * 200)
    earned = torch.zeros(())

    def fly(epsilon):
        with torch.no_grad():
            best = q(kites.state).argmax(1)
        action = torch.where(torch.rand(96) < epsilon, torch.randint(9, (96,)), best)
        before, reward, after, crashed = kites.tick(action)
        replay.put(before, action, reward, after, crashed)
        return reward.mean()

    for _ in range(10):
        fly(1.0)

    for step in range(steps):  # the training loop
        earned += fly(0.05 + 0.95 * math.exp(-step / 60))
        before, action, reward, after, over = replay.draw(768)
        with torch.no_grad():
            goal = reward + 0.98 * (1 - over) * target(after).amax(1)
        value = q(before).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.huber_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(shadows, weights, 0.01)
        if (step + 1) % 40 == 0:
            print(f"{step + 1}: loss {loss.item():.4f}, reward per tick {earned.item() / 40:.3f}")
            earned.zero_()


if __name__ == "__main__":
    main()
