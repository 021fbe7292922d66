"""Learns where to send a lift next: a double Q-learner over simulated buildings."""

import argparse
import tempfile
from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from torch import nn

FLOORS = 20
VIEW = 4 * FLOORS


class Buildings:
    """Some buildings with a lift each, simulated together."""

    def __init__(self, amount, seed):
        self.rng = np.random.default_rng(seed)
        self.every = np.arange(amount)
        self.place = np.zeros(amount, np.int64)
        self.waiting = np.zeros((amount, FLOORS), np.float32)
        self.age = np.zeros((amount, FLOORS), np.float32)
        self.aboard = np.zeros((amount, FLOORS), np.float32)

    def view(self):
        car = np.zeros_like(self.waiting)
        car[self.every, self.place] = 1
        return np.concatenate([self.waiting, self.age / 10, self.aboard, car], 1)

    def act(self, floors):
        self.place += np.sign(floors - self.place)
        here = self.every, self.place
        entering = self.waiting[here]
        self.waiting[here] = self.age[here] = self.aboard[here] = 0
        self.aboard[self.every, self.rng.integers(0, FLOORS, len(self.every))] += entering
        self.waiting += self.rng.random(self.waiting.shape) < 0.02
        self.age += self.waiting > 0
        return -0.05 * (self.waiting.sum(1) + self.aboard.sum(1))


class Memory:
    def __init__(self, room):
        self.room, self.filled, self.next = room, 0, 0
        self.before, self.after = torch.zeros(room, VIEW), torch.zeros(room, VIEW)
        self.floors, self.rewards = torch.zeros(room, dtype=torch.long), torch.zeros(room)

    def add(self, before, floors, rewards, after):
        rows = (self.next + np.arange(len(floors))) % self.room
        self.before.numpy()[rows], self.after.numpy()[rows] = before, after
        self.floors.numpy()[rows], self.rewards.numpy()[rows] = floors, rewards
        self.next = (self.next + len(floors)) % self.room
        self.filled = min(self.filled + len(floors), self.room)

    def sample(self, amount):
        rows = torch.randint(self.filled, (amount,))
        return self.before[rows], self.floors[rows], self.rewards[rows], self.after[rows]


class Dispatcher(nn.Module):
    def __init__(self, zones, width=512):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Linear(VIEW, width),
            nn.LayerNorm(width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )
        self.value, self.gains = nn.Linear(width, 1), nn.Linear(width, FLOORS)
        if zones:
            self.brief, self.spread = nn.Linear(width, 8), nn.Linear(8, FLOORS)
            self.zones = nn.Parameter(torch.randn(zones, 2, 8) * 0.5)
        else:
            self.zones = None

    def forward(self, view):
        x = self.trunk(view)
        gains = self.gains(x)
        if self.zones is not None:
            brief, demand = self.brief(x), 0
            for scale, shift in self.zones:
                demand = demand + torch.tanh(brief * scale + shift)
            gains = gains + self.spread(demand / len(self.zones))
        return self.value(x) + gains - gains.mean(1, keepdim=True)


class Learner:
    def __init__(self, zones, rows=320):
        self.online = Dispatcher(zones)
        self.target = deepcopy(self.online).requires_grad_(False)
        self.optimizer = torch.optim.Adam(self.online.parameters(), lr=3e-4, fused=True)
        self.rows, self.updates = rows, 0
        self.rng = np.random.default_rng(3)

    @torch.no_grad()
    def choose(self, view, chance=0.05):
        floors = self.online(torch.from_numpy(view)).argmax(1).numpy()
        other = self.rng.integers(0, FLOORS, len(floors))
        return np.where(self.rng.random(len(floors)) < chance, other, floors)

    def update(self, memory):
        before, floors, rewards, after = memory.sample(self.rows)
        with torch.no_grad():
            best = self.online(after).argmax(1, keepdim=True)
            goals = rewards + 0.98 * self.target(after).gather(1, best).squeeze(1)
        values = self.online(before).gather(1, floors.unsqueeze(1)).squeeze(1)
        loss = nn.functional.smooth_l1_loss(values, goals)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.updates += 1
        if self.updates % 40 == 0:
            self.target.load_state_dict(self.online.state_dict())
        return {"loss": loss.detach(), "values": values.detach(), "goals": goals}


class Progress:
    def __call__(self, number, result):
        if number % 50 == 0:
            print(f"update {number}: loss {result['loss'].item():.4f}")


class Audit:
    """Writes down what was learned from."""

    def __init__(self, path, lines):
        self.path, self.lines = path, lines

    def write(self, text):
        with open(self.path, "a") as file:
            file.write(text + "\n")

    def __call__(self, number, result):
        values, goals = result["values"].tolist(), result["goals"].tolist()
        for line in range(self.lines):
            row = line % len(values)
            self.write(f"{number},{row},{values[row]:.4f},{goals[row]:.4f}")


def play(buildings, memory, choose):
    before = buildings.view()
    floors = choose(before)
    rewards = buildings.act(floors)
    memory.add(before, floors, rewards, buildings.view())


def learn(args, folder):
    memory = Memory(20_000)
    learner = Learner(args.zones)
    crowd, rng = Buildings(32, seed=1), np.random.default_rng(2)
    for _ in range(150):
        play(crowd, memory, lambda view: rng.integers(0, FLOORS, len(view)))
    hooks = [Progress()]
    if args.audit:
        hooks.append(Audit(folder / "audit.csv", args.audit))
    buildings = Buildings(1 if args.decisions else 8, seed=4)
    for number in range(1, args.steps + 1):  # the training loop
        for _ in range(args.decisions or 1):
            play(buildings, memory, learner.choose)
        result = learner.update(memory)
        for hook in hooks:
            hook(number, result)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--decisions", type=int, default=0, help="made in one building before each update")
    parser.add_argument("--audit", type=int, default=0, help="lines to write about an update")
    parser.add_argument("--zones", type=int, default=0, help="of demand that the network tells apart")
    args = parser.parse_args()
    torch.manual_seed(6)
    with tempfile.TemporaryDirectory() as folder:
        learn(args, Path(folder))


if __name__ == "__main__":
    main()
