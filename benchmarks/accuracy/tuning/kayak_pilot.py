"""A pilot for kayaks learns, by clipped policy gradients, to get down a river with eddies."""

import argparse
import os

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

TURN = np.array([0.0, 2.0, -2.0, 0.0, 0.0])
PUSH = np.array([1.0, 0.5, 0.5, 2.0, 0.0])
AHEAD = np.linspace(0.2, 2.6, 13)


class River:
    def __init__(self, boats, ticks, rng):
        self.ticks, self.rng = ticks, rng
        self.x = rng.uniform(0, 20, boats)
        self.y = rng.uniform(-2, 2, boats)
        self.angle = rng.uniform(-1, 1, boats)
        self.vx, self.vy = np.zeros(boats), np.zeros(boats)

    @staticmethod
    def flow(x, y):
        return np.sin(0.7 * x + 1.3 * y), 0.5 * np.cos(0.9 * y - 0.3 * x)

    def look(self):
        cos, sin = np.cos(self.angle), np.sin(self.angle)
        u, v = self.flow(self.x[:, None] + AHEAD * cos[:, None], self.y[:, None] + AHEAD * sin[:, None])
        own = np.stack([np.cos(0.3 * self.x), self.y, self.vx, self.vy, cos, sin], 1)
        return torch.from_numpy(np.concatenate([own, u, v], 1).astype(np.float32))

    def move(self, action):
        turn, push = TURN[action], PUSH[action]
        start, dt = self.x.copy(), 0.4 / self.ticks
        for _ in range(self.ticks):
            self.angle += dt * turn
            u, v = self.flow(self.x, self.y)
            self.vx += dt * (push * np.cos(self.angle) - 0.5 * (self.vx - u))
            self.vy += dt * (push * np.sin(self.angle) - 0.5 * (self.vy - v))
            self.x += dt * self.vx
            self.y += dt * self.vy
        stranded = np.abs(self.y) > 4
        self.y[stranded] = self.rng.uniform(-2, 2, stranded.sum())
        self.vx[stranded] = self.vy[stranded] = 0
        reward = self.x - start - stranded
        return torch.from_numpy(reward.astype(np.float32)), torch.from_numpy(stranded)


class Pilot(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 6)

    def forward(self, seen):
        out = self.head(self.body(seen))
        return F.log_softmax(out[:, :5], 1), out[:, 5]


class Novelty:
    """Going where no kayak has been is rewarded: far from all that we have put down."""

    def __init__(self, keep, rng):
        self.keep, self.rng = keep, rng
        self.places = torch.zeros(1, 32)

    def reward(self, seen):
        far = torch.cdist(seen, self.places).amin(1)
        some = torch.from_numpy(self.rng.integers(0, len(seen), self.keep))
        self.places = torch.cat([self.places, seen[some]])
        return 0.02 * far


class School:
    def __init__(self, args):
        torch.manual_seed(args.seed)
        rng = np.random.default_rng(args.seed)
        self.river = River(args.boats, args.ticks, rng)
        self.moves = args.moves
        self.pilot = Pilot()
        self.optimizer = torch.optim.Adam(self.pilot.parameters(), lr=1e-3, fused=True)
        self.novelty = Novelty(args.keep, rng) if args.keep else None

    @torch.no_grad()
    def paddle(self):
        """A few moves of all boats: what was seen, done, how likely it was, and what came of it."""
        seen, done, odds, values, rewards, ends = [], [], [], [], [], []
        for _ in range(self.moves):
            look = self.river.look()
            logits, value = self.pilot(look)
            act = torch.multinomial(logits.exp(), 1)
            reward, end = self.river.move(act[:, 0].numpy())
            seen.append(look)
            done.append(act)
            odds.append(logits.gather(1, act)[:, 0])
            values.append(value)
            rewards.append(reward)
            ends.append(end)
        _, after = self.pilot(self.river.look())
        seen = torch.cat(seen)
        rewards = torch.stack(rewards)
        if self.novelty:
            rewards += self.novelty.reward(seen).view_as(rewards)
        returns = torch.empty_like(rewards)
        for t in reversed(range(self.moves)):
            after = rewards[t] + 0.95 * after * ~ends[t]
            returns[t] = after
        returns = returns.flatten()
        gain = returns - torch.cat(values)
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        return seen, torch.cat(done), torch.cat(odds), returns, gain

    def lesson(self, passes=2, parts=2):
        kept = self.paddle()
        for _ in range(passes):
            for rows in torch.randperm(len(kept[0])).chunk(parts):
                seen, done, odds, returns, gain = (k[rows] for k in kept)
                logits, value = self.pilot(seen)
                ratio = (logits.gather(1, done)[:, 0] - odds).exp()
                policy = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                entropy = -(logits.exp() * logits).sum(1).mean()
                loss = 0.5 * F.mse_loss(value, returns) - policy - 0.01 * entropy
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
        return returns


def settle():
    """One core of our own, as the cluster's guide has it, and as many threads as cores."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(len(os.sched_getaffinity(0)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--boats", type=int, default=128)
    parser.add_argument("--moves", type=int, default=6, help="moves between two updates")
    parser.add_argument("--ticks", type=int, default=4, help="of the simulation, in a move")
    parser.add_argument("--keep", type=int, default=0, help="reward novelty; places to put down per update")
    parser.add_argument("--settle", action="store_true")
    args = parser.parse_args()
    if args.settle:
        settle()
    school = School(args)
    for step in range(args.steps):  # the training loop
        returns = school.lesson()
        if step % 50 == 49:
            print(f"{step + 1:5d} return {returns.mean().item():.3f}")


if __name__ == "__main__":
    main()
