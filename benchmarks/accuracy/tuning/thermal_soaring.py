"""Teaches a fleet of gliders to stay up in thermals: quantile regression DQN on a prioritised replay."""

import argparse
import gc
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

GLIDERS, THERMALS = 32, 8
ACTIONS, QUANTILES, FEATURES = 9, 32, 20
BATCH, DISCOUNT = 384, 0.98
SINK, REGION, CEILING = 0.9, 3000.0, 2000.0
TURNS = np.radians(np.linspace(-24.0, 24.0, ACTIONS))


class Airspace:
    """Gliders that share one sky. A step is two seconds of flight, for all of them at once."""

    def __init__(self, gliders, rng):
        self.gliders, self.rng = gliders, rng
        self.centres = rng.uniform(-REGION, REGION, (THERMALS, 2))
        self.strength = rng.uniform(2.0, 5.0, THERMALS)
        self.breadth = rng.uniform(150.0, 400.0, THERMALS) ** 2
        self.place = np.zeros((gliders, 2))
        self.heading = np.zeros(gliders)
        self.height = np.zeros(gliders)
        self.bank = np.zeros(gliders)
        self.clock = np.zeros(gliders)
        self.past = np.zeros((gliders, 10))

    def reset(self):
        self._launch(np.arange(self.gliders))
        return self._observe()

    def step(self, actions):
        self.bank = TURNS[actions]
        self.heading = (self.heading + self.bank) % math.tau
        self.place[:, 0] += 60.0 * np.cos(self.heading)
        self.place[:, 1] += 60.0 * np.sin(self.heading)
        climb = self._lift() - SINK - 4.0 * self.bank**2
        self.height = np.minimum(self.height + 2.0 * climb, CEILING)
        self.clock += 1.0
        self.past = np.concatenate([climb[:, None], self.past[:, :-1]], axis=1)
        landed = (self.height <= 0.0) | (np.abs(self.place).max(axis=1) > 1.5 * REGION)
        reward = np.where(landed, -5.0, climb)
        if landed.any():
            self._launch(np.flatnonzero(landed))
        return self._observe(), reward, landed

    def _lift(self):
        apart = self.place[:, None, :] - self.centres
        return (self.strength * np.exp(-(apart**2).sum(axis=2) / self.breadth)).sum(axis=1)

    def _launch(self, who):
        self.place[who] = self.rng.uniform(-REGION, REGION, (len(who), 2))
        self.heading[who] = self.rng.uniform(0.0, math.tau, len(who))
        self.height[who] = self.rng.uniform(300.0, 600.0, len(who))
        self.bank[who] = 0.0
        self.clock[who] = 0.0
        self.past[who] = 0.0

    def _observe(self):
        seen = np.zeros((self.gliders, FEATURES), np.float32)
        seen[:, :10] = self.past
        seen[:, 10] = np.sin(self.heading)
        seen[:, 11] = np.cos(self.heading)
        seen[:, 12] = self.height / 500.0
        seen[:, 13:15] = self.place / REGION
        seen[:, 15] = self.bank
        seen[:, 16] = self.clock / 200.0
        seen[:, 17] = self.past.mean(axis=1)
        return seen


class Lookahead:
    """Wraps an airspace: the last two features become the best lift on some rays ahead, and its bearing."""

    def __init__(self, env, rays, distances=(120.0, 240.0, 360.0, 480.0)):
        self.env, self.rays, self.distances = env, rays, distances
        self.thermals = list(
            zip(env.centres.tolist(), env.strength.tolist(), env.breadth.tolist(), strict=False)
        )

    def step(self, actions):
        seen, reward, landed = self.env.step(actions)
        for glider in range(self.env.gliders):
            seen[glider, -2:] = self._best_ray(glider)
        return seen, reward, landed

    def _best_ray(self, glider):
        x, y = self.env.place[glider].tolist()
        heading = float(self.env.heading[glider])
        best, bearing = 0.0, 0.0
        for ray in range(self.rays):
            angle = math.pi * ((ray + 0.5) / self.rays - 0.5)
            east, north = math.cos(heading + angle), math.sin(heading + angle)
            lift = 0.0
            for distance in self.distances:
                ahead_x, ahead_y = x + distance * east, y + distance * north
                for (cx, cy), strength, breadth in self.thermals:
                    lift += strength * math.exp(-((ahead_x - cx) ** 2 + (ahead_y - cy) ** 2) / breadth)
            if lift > best:
                best, bearing = lift, angle
        return best, bearing


class Batch(NamedTuple):
    seen: torch.Tensor
    action: torch.Tensor
    reward: torch.Tensor
    following: torch.Tensor
    alive: torch.Tensor
    weight: torch.Tensor


class Memory:
    """A ring of the last decisions of each glider; those that surprised are drawn more often."""

    def __init__(self, length, gliders, trace, rng):
        shape = (length, gliders)
        self.seen = np.zeros((*shape, FEATURES), np.float32)
        self.following = np.zeros((*shape, FEATURES), np.float32)
        self.action = np.zeros(shape, np.int64)
        self.reward = np.zeros(shape, np.float32)
        self.alive = np.zeros(shape, np.float32)
        self.priority = np.zeros(shape)
        self.length, self.gliders, self.trace, self.rng = length, gliders, trace, rng
        self.now, self.highest = 0, 1.0

    def store(self, seen, action, reward, following, landed):
        now = self.now
        self.seen[now] = seen
        self.action[now] = action
        self.reward[now] = reward
        self.following[now] = following
        self.alive[now] = ~landed
        self.priority[now] = self.highest
        self.now = (now + 1) % self.length

    def sample(self, amount):
        heap = np.cumsum(self.priority)
        picks = np.searchsorted(heap, self.rng.random(amount) * heap[-1])
        where = np.divmod(picks, self.gliders)
        weight = (self.priority[where] / heap[-1] * heap.size) ** -0.4
        weight = (weight / weight.max()).astype(np.float32)
        parts = [part[where] for part in (self.seen, self.action, self.reward, self.following, self.alive)]
        return where, Batch(*map(torch.from_numpy, [*parts, weight]))

    def revise(self, where, errors):
        """Sets the priorities of what was drawn; with a trace, also of the decisions that led there."""
        fresh = (errors + 0.01) ** 0.6
        self.priority[where] = fresh
        self.highest = max(self.highest, float(fresh.max()))
        if not self.trace:
            return
        times, gliders = where
        for time, glider, share in zip(times.tolist(), gliders.tolist(), fresh.tolist(), strict=False):
            for back in range(1, self.trace + 1):
                share *= 0.97
                earlier = (time - back) % self.length
                if share > self.priority[earlier, glider]:
                    self.priority[earlier, glider] = share


class Fix(NamedTuple):
    update: int
    glider: int
    x: float
    y: float
    height: float


class TrackRecorder:
    """Keeps points of the flown tracks, for the map that is drawn afterwards."""

    def __init__(self, points):
        self.points = points
        self.fixes, self.fresh, self.last = [], 0, None

    def note(self, update, place, height):
        here = np.column_stack([place, height]).tolist()
        last = self.last or here
        for number in range(self.points):
            glider, part = number % len(here), number / self.points
            (x0, y0, h0), (x1, y1, h1) = last[glider], here[glider]
            x, y, h = x0 + part * (x1 - x0), y0 + part * (y1 - y0), h0 + part * (h1 - h0)
            self.fixes.append(Fix(update, glider, x, y, h))
            self.fresh += 1
            if self.fresh == 400:
                self._thin_out()
        self.last = here

    def _thin_out(self):
        self.fixes = self.fixes[-3000:]
        self.fresh = 0
        gc.collect()


def make_network():
    return nn.Sequential(
        nn.Linear(FEATURES, 384),
        nn.ReLU(),
        nn.Linear(384, 384),
        nn.ReLU(),
        nn.Linear(384, 384),
        nn.ReLU(),
        nn.Linear(384, ACTIONS * QUANTILES),
        nn.Unflatten(1, (ACTIONS, QUANTILES)),
    )


@torch.no_grad()
def act(network, seen, epsilon, rng):
    greedy = network(torch.from_numpy(seen)).mean(2).argmax(1).numpy()
    at_random = rng.integers(ACTIONS, size=len(greedy))
    return np.where(rng.random(len(greedy)) < epsilon, at_random, greedy)


def quantile_loss(online, target, batch, levels):
    """Returns the loss of each row, and the two distributions of return that it compares."""
    rows = torch.arange(len(batch.action))
    believed = online(batch.seen)[rows, batch.action]
    with torch.no_grad():
        best = online(batch.following).mean(2).argmax(1)
        ahead = target(batch.following)[rows, best]
        goal = batch.reward[:, None] + DISCOUNT * batch.alive[:, None] * ahead
        below = goal[:, None, :] < believed[:, :, None]
        share = (levels[:, None] - below.float()).abs()
    wide = believed[:, :, None].expand_as(share)
    huber = nn.functional.smooth_l1_loss(wide, goal[:, None, :].expand_as(share), reduction="none")
    return (share * huber).sum(1).mean(1), believed.detach(), goal


@torch.no_grad()
def cramer_distance(believed, goal, levels):
    """How far the distributions are apart: the squared gap of their cumulated shares, over the returns."""
    low, high = goal.min().item(), goal.max().item()
    width, total = (high - low) / levels, 0.0
    for number in range(levels):
        level = low + (number + 0.5) * width
        apart = (believed <= level).float().mean(1) - (goal <= level).float().mean(1)
        total += width * apart.square().mean().item()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rays", type=int, default=0, help="rays on which each glider looks for lift")
    parser.add_argument("--trace", type=int, default=0, help="decisions back that share a surprise")
    parser.add_argument("--track-points", type=int, default=0, help="points of the tracks kept per update")
    parser.add_argument("--levels", type=int, default=0, help="levels of the distance of distributions")
    args = parser.parse_args()
    torch.manual_seed(7)
    rng = np.random.default_rng(7)

    sky = Airspace(GLIDERS, rng)
    memory = Memory(640, GLIDERS, args.trace, rng)
    recorder = TrackRecorder(args.track_points)
    seen = sky.reset()
    for _ in range(memory.length):
        action = rng.integers(ACTIONS, size=GLIDERS)
        following, reward, landed = sky.step(action)
        memory.store(seen, action, reward, following, landed)
        seen = following
    env = Lookahead(sky, args.rays) if args.rays else sky

    online, target = make_network(), make_network().requires_grad_(False)
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-4, fused=True)
    levels = (torch.arange(QUANTILES) + 0.5) / QUANTILES
    distances = []

    for update in range(1, args.steps + 1):  # the training loop
        action = act(online, seen, max(0.05, 0.5 * 0.99**update), rng)
        following, reward, landed = env.step(action)
        memory.store(seen, action, reward, following, landed)
        seen = following
        if args.track_points:
            recorder.note(update, sky.place, sky.height)

        where, batch = memory.sample(BATCH)
        errors, believed, goal = quantile_loss(online, target, batch, levels)
        loss = (batch.weight * errors).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.revise(where, errors.detach().numpy())
        if args.levels:
            distances.append(cramer_distance(believed, goal, args.levels))

        if update % 40 == 0:
            target.load_state_dict(online.state_dict())
        if update % 50 == 0:
            print(f"{update} loss {loss.item():.3f} mean height {sky.height.mean():.0f} m")

    if distances:
        print(f"distance of distributions, last ten updates: {np.mean(distances[-10:]):.4f}")


if __name__ == "__main__":
    main()
