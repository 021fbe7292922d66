"""A heat pump learns from what its thermostat logged (TD3+BC, many critics), and later from a simulator."""

import argparse
import copy
import gc
import gzip
import random
import resource
import tempfile
import threading
from collections import deque
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

CONFIG = {"seed": 23, "rooms": 20, "valves": 6, "logged": 100_000, "batch": 512, "critics": 6, "width": 192}
CONFIG |= {"discount": 0.98, "polyak": 0.01, "pull": 0.4, "snapshot_every": 20, "memory_kib": 200 << 10}


class House:
    def __init__(self, rooms, valves, rng):
        self.rng = rng
        self.coupling = rng.uniform(0, 0.02, (rooms, rooms)).astype(np.float32)
        self.gain = rng.uniform(0, 0.8, (rooms, valves)).astype(np.float32)
        self.temperature = rng.uniform(14, 24, rooms).astype(np.float32)
        self.outside = float(rng.uniform(-10, 12))

    def observe(self):
        return np.append((self.temperature - 20) / 5, np.float32(self.outside / 10))

    def step(self, action):
        flow = self.coupling @ self.temperature - self.coupling.sum(1) * self.temperature
        self.temperature += flow + self.gain @ action - 0.03 * (self.temperature - self.outside)
        self.outside += float(self.rng.normal(0, 0.05))
        comfort = -float(np.abs(self.temperature - 20).mean()) / 5
        return self.observe(), comfort - 0.1 * float(np.square(action).mean())


class Transitions:
    # state, action, reward, next state, whether it was the last
    def __init__(self, capacity, state, action):
        sizes = (state, action, 1, state, 1)
        self.columns = [part.contiguous() for part in torch.randn(capacity, sum(sizes)).split(sizes, dim=1)]
        self.columns[1].clamp_(-1, 1)
        self.columns[4].lt_(-2.3)
        self.capacity, self.cursor = capacity, 0

    def sample(self, count):
        rows = torch.randint(self.capacity, (count,))
        return [column.index_select(0, rows) for column in self.columns]

    def add(self, *values):
        for column, value in zip(self.columns, values, strict=True):
            column[self.cursor] = torch.as_tensor(value)
        self.cursor = (self.cursor + 1) % self.capacity


class Stacked(nn.Module):
    def __init__(self, members, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(members, inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))

    def forward(self, x):
        return torch.baddbmm(self.bias, x, self.weight)


def layered(layer, *sizes):
    parts = [part for pair in pairwise(sizes) for part in (layer(*pair), nn.ReLU())]
    return nn.Sequential(*parts[:-1])


def judge(critics, *parts):
    return critics(torch.cat(parts, 1).expand(len(critics[0].weight), -1, -1)).squeeze(2)


class Agent:
    def __init__(self, config, blocks):
        state, action, width = config["rooms"] + 1, config["valves"], config["width"]
        self.config, self.blocks, self.updates = config, blocks, 0
        self.actor = layered(nn.Linear, state, width, width, action).append(nn.Tanh())
        self.critics = layered(partial(Stacked, config["critics"]), state + action, width, width, 1)
        self.old_actor = copy.deepcopy(self.actor).requires_grad_(False)
        self.old_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.optimizers = [
            torch.optim.Adam(part.parameters(), lr=3e-4, fused=True) for part in (self.actor, self.critics)
        ]
        self.current = [*self.actor.parameters(), *self.critics.parameters()]
        self.old = [*self.old_actor.parameters(), *self.old_critics.parameters()]
        self.errors = deque(maxlen=4000)

    @torch.no_grad()
    def act(self, observation):
        action = self.actor(torch.from_numpy(observation).unsqueeze(0)).squeeze(0)
        return (action + 0.1 * torch.randn_like(action)).clamp_(-1, 1).numpy()

    def descend(self, loss, which):
        self.optimizers[which].zero_grad()
        loss.backward()
        if self.blocks:
            tame(self.optimizers[which].param_groups[0]["params"], self.blocks)
        self.optimizers[which].step()

    def update(self, seen, done_by, reward, then, over):
        with torch.no_grad():
            later = judge(self.old_critics, then, self.old_actor(then)).amin(0, keepdim=True)
            wanted = reward.T + self.config["discount"] * (1 - over.T) * later
        values = judge(self.critics, seen, done_by)
        loss = F.smooth_l1_loss(values, wanted.expand_as(values))
        self.descend(loss, 1)
        self.errors.append(loss.item())

        self.critics.requires_grad_(False)
        action = self.actor(seen)
        value = judge(self.critics, seen, action).mean(0)
        wish = self.config["pull"] * value.mean() / value.detach().abs().mean()
        self.descend(F.mse_loss(action, done_by) - wish, 0)
        self.critics.requires_grad_(True)
        with torch.no_grad():
            torch._foreach_lerp_(self.old, self.current, self.config["polyak"])
        self.updates += 1

    def state(self):
        parts = self.actor, self.critics, self.old_actor, self.old_critics, *self.optimizers
        return [part.state_dict() for part in parts]


def tame(params, blocks):
    """No block of a gradient may be longer than a hundredth of the weights that it belongs to."""
    for weights in params:
        parts = weights.detach().view(-1).chunk(blocks)
        for values, grad in zip(parts, weights.grad.view(-1).chunk(blocks), strict=True):
            allowed = 0.01 * values.norm().clamp(min=1e-3)
            length = grad.norm()
            if length > allowed:
                grad.mul_(allowed / length)


class Monitor(threading.Thread):
    """Keeps confidence bounds of the critics' error fresh for the page in the browser."""

    def __init__(self, errors, resamples):
        super().__init__(daemon=True)
        self.errors, self.resamples, self.bounds = errors, resamples, (0.0, 0.0)
        self.draw = random.Random(5)

    def run(self):
        while True:
            threading.Event().wait(0.02)
            recent = list(self.errors)[-40:] or [0.0]
            means = sorted(sum(self.draw.choices(recent, k=40)) / 40 for _ in range(self.resamples))
            self.bounds = means[len(means) // 20], means[-1 - len(means) // 20]


class Day:
    def __init__(self, number):
        self.key, self.rooms, self.links = number, [number % 7], {"next": number + 1}
        self.owner = self


def watch_memory(limit):
    if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > limit:
        gc.collect()


def explore(agent, house, memory, minutes):
    observation = house.observe()
    for _ in range(minutes):
        action = agent.act(observation)
        following, reward = house.step(action)
        memory.add(observation, action, reward, following, 0.0)  # winter has no end
        observation = following


def save(folder, agent, memory, rows):
    torch.save(agent.state(), folder / f"agent{agent.updates % 2}.pt")
    with gzip.open(folder / "memory.pt.gz", "wb", compresslevel=4) as file:
        torch.save([column[:rows].clone() for column in memory.columns], file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=231)
    parser.add_argument("--interact", type=int, default=0, help="minutes in the simulator for each update")
    parser.add_argument("--bounds", type=int, default=0, help="resamples for the live confidence bounds")
    parser.add_argument("--days", type=int, default=0, help="days on record, in hundreds")
    parser.add_argument("--blocks", type=int, default=0, help="blocks of a tensor that are kept in check")
    parser.add_argument("--cores", type=int, default=0, help="cores of the node")
    parser.add_argument("--resumable", type=int, default=0, help="transitions that go into a snapshot")
    options = parser.parse_args()

    torch.manual_seed(CONFIG["seed"])
    rooms, valves = CONFIG["rooms"], CONFIG["valves"]
    if options.cores:
        torch.set_num_threads(options.cores)
    house = House(rooms, valves, np.random.default_rng(CONFIG["seed"]))
    agent = Agent(CONFIG, options.blocks)
    memory = Transitions(CONFIG["logged"], rooms + 1, valves)
    gc.collect()
    gc.freeze()  # what the imports brought is here to stay
    record = [Day(number) for number in range(100 * options.days)]
    if options.bounds:
        Monitor(agent.errors, options.bounds).start()

    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.steps):  # the training loop
            if options.interact:
                explore(agent, house, memory, options.interact)
            agent.update(*memory.sample(CONFIG["batch"]))
            if record:
                watch_memory(CONFIG["memory_kib"])
            if options.resumable and agent.updates % CONFIG["snapshot_every"] == 0:
                save(Path(folder), agent, memory, options.resumable)
    print(f"{agent.updates} updates, last critic loss {agent.errors[-1]:.4f}")


if __name__ == "__main__":
    main()
