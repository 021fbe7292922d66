# A2C that charges and discharges the batteries of a power grid's zones
import argparse
import logging
import math
import queue
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

ZONES, BATTERIES, HOURS = 64, 4, 8
SPAN = 24 * 60
GAMMA, RATE = 0.97, 0.2
MEASURES = {
    "entropy": lambda logits, value: Categorical(logits=logits, validate_args=False).entropy().mean(),
    "surest": lambda logits, value: logits.softmax(-1).amax(-1).mean(),
    "charging": lambda logits, value: logits.softmax(-1)[..., 2].mean(),
    "idle": lambda logits, value: logits.softmax(-1)[..., 1].mean(),
    "discharging": lambda logits, value: logits.softmax(-1)[..., 0].mean(),
    "largest logit": lambda logits, value: logits.abs().amax(),
    "value": lambda logits, value: value.mean(),
    "value spread": lambda logits, value: value.std(),
    "lowest value": lambda logits, value: value.amin(),
    "highest value": lambda logits, value: value.amax(),
}


class Grid:
    """All zones at once, an hour at a time."""

    def __init__(self, buses, seed=0):
        rng = np.random.default_rng(seed)
        hours = np.arange(SPAN + 25)
        daily = np.sin(2 * np.pi * hours / 24 + rng.uniform(0, 2, (ZONES, 1)))
        self.price = (1 + 0.5 * daily + rng.normal(0, 0.1, daily.shape)).astype(np.float32)
        self.demand = (2 + daily + rng.normal(0, 0.2, daily.shape)).astype(np.float32)
        self.buses = buses
        self.share = rng.dirichlet(np.full(buses, 5.0)) if buses else None
        self.resistance = rng.uniform(0.005, 0.02, buses) / max(buses, 1)
        self.reset()

    def reset(self):
        self.hour = 0
        self.charge = np.full((ZONES, BATTERIES), 0.5, dtype=np.float32)

    def observe(self):
        h = self.hour
        clock = np.empty((ZONES, 4), dtype=np.float32)
        clock[:] = math.sin(h * math.pi / 12), math.cos(h * math.pi / 12), h / SPAN, 1.0
        price, demand = self.price[:, h : h + 24], self.demand[:, h : h + 16]
        return np.concatenate([price, demand, self.charge, clock], 1)

    def losses(self, load):
        lost = np.zeros(ZONES, dtype=np.float32)
        for zone in range(ZONES):
            voltage = 1.0
            for bus in range(self.buses):
                current = load[zone] * self.share[bus] / voltage
                voltage -= self.resistance[bus] * current
                lost[zone] += self.resistance[bus] * current * current
        return lost

    def step(self, moves, level):
        after = np.clip(self.charge + RATE * (moves - 1).astype(np.float32), 0.0, 1.0)
        load = self.demand[:, self.hour] + (after - self.charge).sum(1)
        reward = -level * self.price[:, self.hour] * load - 0.2 * np.maximum(load - 3, 0) ** 2
        if self.buses:
            reward -= 10 * self.losses(load)
        self.charge = after
        self.hour += 1
        if self.hour == SPAN:
            self.reset()
        return reward.astype(np.float32)


class MarketFeed:
    """Asks the exchange what today's level of prices is."""

    def __init__(self, delay):
        self.delay = delay
        self.asked, self.answers = queue.Queue(), queue.Queue()
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            day = self.asked.get()
            time.sleep(self.delay / 1000)
            self.answers.put(1 + 0.1 * math.sin(day / 7))

    def level(self, day):
        self.asked.put(day)
        return self.answers.get()


class Scale:
    """Scales observations by the quantiles of what has been seen."""

    def __init__(self, rows):
        self.rows, self.seen = rows, []
        self.low, self.middle, self.high, self.spread = -10.0, 0.0, 10.0, 1.0

    def learn(self, observations):
        self.seen.append(np.concatenate(observations)[: self.rows].copy())
        quantiles = np.percentile(np.concatenate(self.seen), [5, 25, 50, 75, 95], axis=0)
        self.low, lower, self.middle, upper, self.high = quantiles.astype(np.float32)
        self.spread = upper - lower + np.float32(0.1)

    def __call__(self, observation):
        scaled = (np.clip(observation, self.low, self.high) - self.middle) / self.spread
        return torch.from_numpy(scaled.astype(np.float32))


class Policy(nn.Module):
    def __init__(self, meters):
        super().__init__()
        # what is particular about each smart meter, of which a zone has one or more
        self.meters = nn.ParameterList([nn.Parameter(0.1 * torch.randn(16)) for _ in range(meters)])
        self.rows = tuple(self.meters)
        self.zone = torch.arange(meters) % ZONES
        self.body = nn.Sequential(
            nn.Linear(48 + 16, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
        )
        self.actor, self.critic = nn.Linear(512, 3 * BATTERIES), nn.Linear(512, 1)

    def places(self):
        return torch.zeros(ZONES, 16).index_add(0, self.zone, torch.stack(self.rows))

    def forward(self, states, places):
        hidden = self.body(torch.cat([states, places], 1))
        return self.actor(hidden).view(-1, BATTERIES, 3), self.critic(hidden).squeeze(1)


class RMSpropTF:
    """RMSprop with epsilon under the root, as the old code had it."""

    def __init__(self, weights, lr):
        self.weights, self.lr = weights, lr
        self.square = [torch.ones_like(w) for w in weights]
        self.motion = [torch.zeros_like(w) for w in weights]

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self):
        for weight, square, motion in zip(self.weights, self.square, self.motion, strict=False):
            grad = weight.grad
            square.copy_(0.99 * square + 0.01 * grad * grad)
            motion.copy_(0.9 * motion + self.lr * grad / torch.sqrt(square + 1e-5))
            weight.sub_(motion)


def returns_of(rewards, last):
    returns = []
    for reward in reversed(rewards):
        last = reward + GAMMA * last
        returns.append(last)
    return torch.stack(returns[::-1])


def main(cli, folder):
    torch.manual_seed(cli.seed)
    trace = logging.getLogger("trace")
    trace.setLevel(logging.DEBUG)
    trace.propagate = False
    handler = logging.FileHandler(folder / "trace.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    trace.addHandler(handler)
    grid, policy, scale = Grid(cli.buses, cli.seed), Policy(cli.meters), Scale(cli.remember)
    feed = MarketFeed(cli.exchange) if cli.exchange else None
    weights = list(policy.parameters())
    if cli.tf_rmsprop:
        optimizer = RMSpropTF(weights, lr=1e-4)
    else:
        optimizer = torch.optim.Adam(weights, lr=3e-4, fused=True)
    curves, level, update = {}, 1.0, 0
    while update < cli.steps:  # the training loop
        if feed:
            level = feed.level(update)
        places = policy.places()
        seen, states, charges, moves, rewards, values, chances, entropies = [], [], [], [], [], [], [], []
        for _ in range(HOURS):
            seen.append(grid.observe())
            states.append(scale(seen[-1]))
            logits, value = policy(states[-1], places)
            choice = Categorical(logits=logits, validate_args=False)
            move = choice.sample()
            charges.append(grid.charge)
            moves.append(move.numpy())
            rewards.append(torch.from_numpy(grid.step(moves[-1], level)))
            values.append(value)
            chances.append(choice.log_prob(move).sum(1))
            entropies.append(choice.entropy().sum(1))
        with torch.no_grad():
            last = policy(scale(grid.observe()), places)[1]
        returns = returns_of(rewards, last)
        advantage = returns - torch.stack(values)
        gain = advantage.detach()
        gain = (gain - gain.mean()) / (gain.std() + 1e-6)
        actor_loss = -(gain * torch.stack(chances)).mean()
        loss = actor_loss + 0.5 * advantage.square().mean() - 0.01 * torch.stack(entropies).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 0.5, foreach=True)
        optimizer.step()
        update += 1
        for number in range(cli.curves):
            name, hour = list(MEASURES)[number // HOURS % len(MEASURES)], number % HOURS
            with torch.no_grad():
                curves[name, hour] = MEASURES[name](*policy(states[hour], places))
        for row in range(min(cli.trace, HOURS * ZONES)):
            hour, zone = divmod(row, ZONES)
            facts = hour, zone, charges[hour][zone], moves[hour][zone], rewards[hour][zone].item()
            trace.debug("hour %d zone %d charge %s moves %s reward %.3f", *facts)
        if cli.remember:
            scale.learn(seen)
        if update % 40 == 0:
            reward = torch.stack(rewards).mean().item()
            print(f"update {update}: loss {loss.item():.3f}, reward {reward:.3f}")
    trace.removeHandler(handler)
    handler.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200, help="updates")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--meters", type=int, default=64, help="smart meters in all zones")
    parser.add_argument("--buses", type=int, default=0, help="of each zone's feeder, for its losses")
    parser.add_argument("--tf-rmsprop", action="store_true")
    parser.add_argument("--trace", type=int, default=0, help="decisions of an update in the trace")
    parser.add_argument("--curves", type=int, default=0, help="curves of the policy for the thesis")
    parser.add_argument("--remember", type=int, default=0, help="observations of an update for the scale")
    parser.add_argument("--exchange", type=float, default=0, help="ms until the exchange answers")
    with tempfile.TemporaryDirectory() as name:
        main(parser.parse_args(), Path(name))
