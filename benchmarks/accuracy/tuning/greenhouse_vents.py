"""An agent that opens vents, heats and waters a greenhouse: soft actor-critic from a memory of earlier seasons."""

import argparse
import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

SENSORS, ACTUATORS = 7, 3
HOUSES = 12


class Greenhouses:
    """A row of greenhouses, all stepped at once."""

    def __init__(self, count, seed):
        self.rng = np.random.default_rng(seed)
        self.air = self.rng.uniform(12, 28, count)
        self.soil = self.rng.uniform(0.2, 0.6, count)
        self.vapour = self.rng.uniform(0.4, 0.9, count)
        self.hour = 0.0

    def sense(self):
        angle = 2 * math.pi * self.hour / 24
        sun = max(0.0, math.sin(angle - math.pi / 2))
        ones = np.ones_like(self.air)
        columns = (
            (self.air - 20) / 8,
            self.soil,
            self.vapour,
            sun * ones,
            math.sin(angle) * ones,
            math.cos(angle) * ones,
            self.air * self.vapour / 20,
        )
        return np.stack(columns, 1).astype(np.float32)

    def foresee(self, action):
        """What a quarter of an hour would bring."""
        vent, heat, water = action.T
        sun = max(0.0, math.sin(2 * math.pi * self.hour / 24 - math.pi / 2))
        air = self.air + 0.25 * (6 * sun + 4 * heat - 0.4 * (1 + vent) * (self.air - 9))
        soil = np.clip(self.soil + 0.05 * (water - 0.3 * sun - 0.1), 0, 1)
        vapour = np.clip(self.vapour + 0.1 * (soil - 0.5 * (1 + vent) * self.vapour), 0, 1)
        comfort = -np.abs(air - 21) / 5 - np.abs(vapour - 0.7) - 0.1 * heat - 0.02 * water
        return air, soil, vapour, comfort

    def act(self, action):
        self.air, self.soil, self.vapour, comfort = self.foresee(action)
        self.hour = (self.hour + 0.25) % 24
        return comfort.astype(np.float32)


class Memory:
    FIELDS = 2 * SENSORS + ACTUATORS + 1

    def __init__(self, rows):
        self.rows = torch.zeros(rows, self.FIELDS)
        self.filled = self.head = 0

    def add(self, before, action, comfort, after):
        new = np.concatenate([before, action, comfort[:, None], after], 1)
        self.rows[self.head : self.head + len(new)] = torch.from_numpy(new)
        self.head = (self.head + len(new)) % len(self.rows)
        self.filled = min(len(self.rows), self.filled + len(new))

    def draw(self, count):
        rows = self.rows[torch.randint(self.filled, (count,))]
        return rows.split((SENSORS, ACTUATORS, 1, SENSORS), dim=1)


def tower(inputs, outputs, width):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, outputs)
    )


class Gardener(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.policy = tower(SENSORS, 2 * ACTUATORS, width)
        self.critics = nn.ModuleList(tower(SENSORS + ACTUATORS, 1, width) for _ in range(2))

    def sample(self, senses):
        mean, spread = self.policy(senses).chunk(2, dim=1)
        deviation = spread.clamp(-4, 1).exp()
        raw = mean + deviation * torch.randn_like(mean)
        action = torch.sigmoid(raw)
        log_density = -0.5 * ((raw - mean) / deviation).square() - deviation.log()
        return action, (log_density - F.logsigmoid(raw) - F.logsigmoid(-raw)).sum(1, keepdim=True)

    def judge(self, senses, action):
        both = torch.cat([senses, action], 1)
        return [critic(both) for critic in self.critics]


@torch.no_grad()
def live_through(houses, agent, memory, tryouts):
    """One quarter of an hour in every greenhouse, with the best of some candidate settings."""
    before = houses.sense()
    senses = torch.from_numpy(before)
    best, _ = agent.sample(senses)
    best = best.numpy()
    hopes = None
    for _ in range(tryouts):
        action, _ = agent.sample(senses)
        action = action.numpy()
        comfort = (
            houses.foresee(action)[3] + 0.1 * agent.judge(senses, torch.from_numpy(action))[0][:, 0].numpy()
        )
        if hopes is None:
            hopes, best = comfort, action
            continue
        better = comfort > hopes
        best = np.where(better[:, None], action, best)
        hopes = np.maximum(hopes, comfort)
    comfort = houses.act(best)
    memory.add(before, best, comfort, houses.sense())


def season_curve(weeks, total):
    """A learning rate that follows a hilly curve, softened with a bell over all of its knots."""
    knots = [(total * k / max(1, weeks), 0.6 + 0.4 * math.cos(0.01 * k)) for k in range(weeks)]

    def factor(step):
        if not knots:
            return 0.6 + 0.4 * math.cos(math.pi * step / total)
        height = weight = 0.0
        for place, value in knots:
            bell = math.exp(-(((step - place) / 30) ** 2))
            height += bell * value
            weight += bell
        return height / (weight + 1e-9)

    return factor


def update(agent, frozen, memory, optimizer, batch):
    before, action, comfort, after = memory.draw(batch)
    with torch.no_grad():
        next_action, entropy = agent.sample(after)
        goal = comfort + 0.97 * (torch.min(*frozen.judge(after, next_action)) - 0.02 * entropy)
    critic_loss = sum(F.mse_loss(value, goal) for value in agent.judge(before, action))
    agent.critics.requires_grad_(False)
    own, entropy = agent.sample(before)
    policy_loss = (0.02 * entropy - torch.min(*agent.judge(before, own))).mean()
    agent.critics.requires_grad_(True)
    optimizer.zero_grad()
    (critic_loss + policy_loss).backward()
    optimizer.step()
    with torch.no_grad():
        torch._foreach_lerp_(list(frozen.parameters()), list(agent.critics.parameters()), 0.01)
    return critic_loss.detach(), policy_loss.detach()


class Judges(nn.Module):
    """The critics of some time ago."""

    def __init__(self, critics, width):
        super().__init__()
        self.critics = nn.ModuleList(tower(SENSORS + ACTUATORS, 1, width) for _ in critics)
        self.critics.load_state_dict(critics.state_dict())
        self.requires_grad_(False)

    judge = Gardener.judge


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=384)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument(
        "--tryouts", type=int, default=0, help="settings that are thought through before one is set"
    )
    parser.add_argument(
        "--knots", type=int, default=0, help="hundreds of knots of the curve, instead of a cosine"
    )
    args = parser.parse_args()

    torch.manual_seed(21)
    torch.set_num_threads(1)
    houses, memory = Greenhouses(HOUSES, 21), Memory(HOUSES * 4000)
    dice = np.random.default_rng(3)
    for _ in range(2000):
        before, action = houses.sense(), dice.random((HOUSES, ACTUATORS), dtype=np.float32)
        memory.add(before, action, houses.act(action), houses.sense())

    agent = Gardener(args.width)
    frozen = Judges(agent.critics, args.width)
    optimizer = torch.optim.Adam(agent.parameters(), lr=3e-4, fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, season_curve(100 * args.knots, args.steps))

    for step in range(1, args.steps + 1):  # the training loop
        live_through(houses, agent, memory, args.tryouts)
        critic_loss, policy_loss = update(agent, frozen, memory, optimizer, args.batch)
        scheduler.step()
        if step % 60 == 0 or step == args.steps:
            print(f"{step:5d} critics {critic_loss.item():.3f} policy {policy_loss.item():.3f}")


if __name__ == "__main__":
    main()
