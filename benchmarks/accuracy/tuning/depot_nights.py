"""Learns which buses of a depot to charge when: a quantile-regression DQN on the old controller's logs."""

from __future__ import annotations

import argparse
import copy
import gc
import math
import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

QUARTERS, LOGGED = 96, 60_000
WIDTH, BLOCKS, QUANTILES = 192, 6, 24


@dataclass(frozen=True)
class Settings:
    lookahead: int  # rewards that a target adds up; 0: the very next only
    solo: int  # quarters in the simulator for each update
    horizons: int  # kinds of steadier weights to choose from for the depot
    layers: int  # first layers to watch for silent units
    sweeps: int  # of memory, in forty updates
    listen: float  # milliseconds for the operator's orders
    buses: int = 30
    plans: int = 12
    batch: int = 256


class Depot:
    """A night in quarters of hours. A plan is a share of the grid connection and a rule who comes first."""

    def __init__(self, buses: int, dice: random.Random):
        self.dice, self.clock = dice, 0
        self.charge = [dice.random() for _ in range(buses)]

    def observe(self) -> list[float]:
        angle = 2 * math.pi * self.clock / QUARTERS
        self.price = 0.5 + 0.4 * math.sin(2 * angle + 1)
        return [*self.charge, math.sin(angle), math.cos(angle), self.price]

    def step(self, plan: int) -> tuple[float, bool]:
        share, rule = (plan % 4 + 1) / 4, plan // 4
        left = share * len(self.charge) / 8
        for bus in sorted(range(len(self.charge)), key=lambda bus: self.charge[bus] * (rule - 1)):
            taken = min(left, 0.3, 1 - self.charge[bus])
            self.charge[bus] += taken
            left -= taken
        self.clock = (self.clock + 1) % QUARTERS
        late = 0.0 if self.clock else sum(1 - charge for charge in self.charge)
        if not self.clock:
            self.charge = [self.dice.random() * charge for charge in self.charge]
        return -self.price * share - late, not self.clock


class Memory:
    def __init__(self, settings: Settings):
        self.settings, self.cursor = settings, 0
        self.state = torch.rand(LOGGED, settings.buses + 3)
        self.plan = torch.randint(settings.plans, (LOGGED,))
        self.reward = -torch.rand(LOGGED)
        self.over = torch.rand(LOGGED) < 1 / QUARTERS

    def store(self, state: list[float], plan: int, reward: float, over: bool) -> None:
        at = self.cursor
        self.state[at] = torch.tensor(state)
        self.plan[at], self.reward[at], self.over[at] = plan, reward, over
        self.cursor = (at + 1) % LOGGED

    def draw(self) -> tuple[Tensor, ...]:
        rows = torch.randint(LOGGED - 2 * QUARTERS, (self.settings.batch,))
        if self.settings.lookahead:
            reward, last, weight = self.look_ahead(rows)
        else:
            reward, last = self.reward[rows], rows
            weight = 0.99 * (1 - self.over[rows].float())
        following = self.state.index_select(0, last + 1)
        return self.state.index_select(0, rows), self.plan[rows], reward, following, weight

    def look_ahead(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Rewards of some moments to come, as far as the night goes."""
        found = []
        for row in rows.tolist():
            total, weight = 0.0, 1.0
            for at in range(row, row + self.settings.lookahead):
                total += weight * self.reward[at].item()
                weight *= 0.99
                if self.over[at]:
                    weight = 0.0
                    break
            found.append((total, at, weight))
        return tuple(torch.tensor(column) for column in zip(*found, strict=True))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.silu(self.first(self.norm(x))))


def returns_network(settings: Settings) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(settings.buses + 3, WIDTH),
        *(Block(WIDTH) for _ in range(BLOCKS)),
        nn.Linear(WIDTH, settings.plans * QUANTILES),
        nn.Unflatten(1, (settings.plans, QUANTILES)),
    )


def toward(share: float):
    return lambda average, current, _: average + share * (current - average)


def watch(network: nn.Module, count: int) -> dict[str, Tensor]:
    """Notes for the first layers what share of their units is silent in the pass that follows."""
    silent: dict[str, Tensor] = {}
    layers = ((name, part) for name, part in network.named_modules() if isinstance(part, nn.Linear))
    for name, layer in islice(layers, count):

        def note(_: nn.Module, __: tuple[Tensor], output: Tensor, name: str = name) -> None:
            silent[name] = (output[:16] < 0).float().mean()

        layer.register_forward_hook(note)
    return silent


class Operator:
    def __init__(self, patience: float):
        self.line = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.line.bind(("127.0.0.1", 0))
        self.line.settimeout(patience)

    def order(self) -> bytes:
        try:
            return self.line.recv(64)
        except TimeoutError:
            return b""


class Learner:
    def __init__(self, settings: Settings):
        self.settings, self.updates = settings, 0
        self.memory = Memory(settings)
        self.online = returns_network(settings)
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.weights = list(self.online.parameters()), list(self.target.parameters())
        self.optimizer = torch.optim.Adam(self.weights[0], lr=5e-4, fused=True)
        self.rows = torch.arange(settings.batch)
        self.levels = (torch.arange(QUANTILES).unsqueeze(1) + 0.5) / QUANTILES
        self.losses, self.silent = [], {}
        self.nights = self.experience(Depot(settings.buses, random.Random(3)))
        shares = [1 / (2 + number) for number in range(settings.horizons)]
        self.steady = [AveragedModel(self.online, avg_fn=toward(share)) for share in shares]

    @torch.no_grad()
    def act(self, seen: list[float]) -> int:
        return int(self.online(torch.tensor([seen])).mean(2).argmax())

    def experience(self, depot: Depot) -> Iterator[tuple[list[float], int, float, bool]]:
        while True:
            seen = depot.observe()
            plan = self.act(seen) if depot.dice.random() > 0.05 else depot.dice.randrange(12)
            yield seen, plan, *depot.step(plan)

    def loss(self, state, plan, reward, following, weight) -> Tensor:
        with torch.no_grad():
            best = self.online(following).mean(2).argmax(1)
            wanted = reward.unsqueeze(1) + weight.unsqueeze(1) * self.target(following)[self.rows, best]
        found = self.online(state)[self.rows, plan]
        gap = wanted.unsqueeze(1) - found.unsqueeze(2)
        bent = F.huber_loss(gap, torch.zeros(()).expand_as(gap), reduction="none")
        return (bent * (self.levels - (gap < 0).float()).abs()).mean()

    def update(self) -> None:
        for moment in islice(self.nights, self.settings.solo):
            self.memory.store(*moment)
        if self.settings.layers:
            self.silent = watch(self.online, self.settings.layers)
        self.optimizer.zero_grad()
        loss = self.loss(*self.memory.draw())
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights[0], 10.0)
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.weights[1], self.weights[0], 0.01)
        for average in self.steady:
            average.update_parameters(self.online)
        self.losses.append(loss.detach())
        self.updates += 1
        if self.updates * self.settings.sweeps % 40 < self.settings.sweeps:
            gc.collect()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=211)
    for option in ("--lookahead", "--solo", "--horizons", "--layers", "--sweeps"):
        parser.add_argument(option, type=int, default=0)
    parser.add_argument("--listen", type=float, default=0.0)
    options = vars(parser.parse_args())
    steps = options.pop("steps")
    torch.manual_seed(5)
    learner = Learner(Settings(**options))
    operator = Operator(options["listen"] / 1000) if options["listen"] else None
    while learner.updates < steps:  # the training loop
        learner.update()
        if operator and operator.order() == b"stop":
            break
    print(f"{learner.updates} updates, loss {torch.stack(learner.losses[-20:]).mean():.4f}")
