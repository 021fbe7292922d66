"""Double DQN for a gantry crane: bring the trolley to its place while the load swings little."""

import argparse
import math
import os
import random
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

FORCES = (-2.0, -0.7, 0.0, 0.7, 2.0)


@dataclass
class Settings:
    steps: int = 200
    batch: int = 1024
    width: int = 256
    gamma: float = 0.98
    live: int = 0
    keep: int = 0


class Crane:
    """One crane, for what the agent does itself."""

    def __init__(self, rng):
        self.rng = rng
        self.reset()

    def reset(self):
        self.x, self.v, self.angle, self.turn = (
            self.rng.uniform(-2, 2),
            0.0,
            self.rng.uniform(-0.2, 0.2),
            0.0,
        )
        self.clock = 0
        return self.view()

    def view(self):
        return [self.x, self.v, math.sin(self.angle), math.cos(self.angle), self.turn, abs(self.x)]

    def step(self, action):
        force = FORCES[action]
        self.v += 0.05 * (force - 0.1 * self.v)
        self.turn += 0.05 * (-9.8 * math.sin(self.angle) - force * math.cos(self.angle) - 0.05 * self.turn)
        self.x += 0.05 * self.v
        self.angle += 0.05 * self.turn
        self.clock += 1
        reward = -abs(self.x) - self.angle**2
        return self.view(), reward, self.clock >= 200 or abs(self.x) > 4


def random_play(rows, rng):
    """What 500 cranes did in the hands of beginners."""
    cranes = 500
    x, angle = rng.uniform(-2, 2, cranes), rng.uniform(-0.2, 0.2, cranes)
    v, turn = np.zeros(cranes), np.zeros(cranes)
    forces, parts = np.array(FORCES), []

    def view():
        return np.stack([x, v, np.sin(angle), np.cos(angle), turn, np.abs(x)], 1)

    for _ in range(rows // cranes):
        before, action = view(), rng.integers(0, len(FORCES), cranes)
        force = forces[action]
        v = v + 0.05 * (force - 0.1 * v)
        turn = turn + 0.05 * (-9.8 * np.sin(angle) - force * np.cos(angle) - 0.05 * turn)
        x, angle = x + 0.05 * v, angle + 0.05 * turn
        reward = -np.abs(x) - angle**2
        parts.append(np.concatenate([before, action[:, None], reward[:, None], view()], 1))
        out = np.abs(x) > 4
        x[out], v[out] = rng.uniform(-2, 2, out.sum()), 0
    return torch.from_numpy(np.concatenate(parts).astype(np.float32))


def network(width):
    return torch.nn.Sequential(
        torch.nn.Linear(6, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, len(FORCES)),
    )  # fmt: skip


def drive(crane, state, online, memory, place, steps, rng):
    """Drive the crane with the newest policy, and remember what happens."""
    for _ in range(steps):
        if rng.random() < 0.1:
            action = rng.randrange(len(FORCES))
        else:
            with torch.no_grad():
                action = int(online(torch.tensor([state])).argmax())
        after, reward, done = crane.step(action)
        memory[place] = torch.tensor([*state, action, reward, *after])
        place = (place + 1) % len(memory)
        state = crane.reset() if done else after
    return state, place


def main(cfg):
    torch.manual_seed(11)
    rng = random.Random(11)
    memory = random_play(200_000, np.random.default_rng(11))
    online, target = network(cfg.width), network(cfg.width)
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    ours, theirs = list(online.parameters()), list(target.parameters())
    optimizer = torch.optim.Adam(ours, lr=5e-4, fused=True)
    crane, place = Crane(rng), 0
    state = crane.view()
    folder = tempfile.TemporaryDirectory()

    for step in range(1, cfg.steps + 1):  # the training loop
        if cfg.live:
            state, place = drive(crane, state, online, memory, place, cfg.live, rng)
        rows = memory[torch.randint(len(memory), (cfg.batch,))]
        before, action, reward, after = rows[:, :6], rows[:, 6].long(), rows[:, 7], rows[:, 8:]
        with torch.no_grad():
            best = online(after).argmax(1, keepdim=True)
            goal = reward + cfg.gamma * target(after).gather(1, best)[:, 0]
        value = online(before).gather(1, action[:, None])[:, 0]
        loss = F.smooth_l1_loss(value, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(theirs, ours, 0.01)
        if cfg.keep and step % 10 == 0:
            # a run can only go on if its memory is there, too
            weights = {f"w{i}": p.detach().numpy() for i, p in enumerate(ours)}
            name = os.path.join(folder.name, "run.npz")
            np.savez_compressed(name, memory=memory[: 1000 * cfg.keep].numpy(), step=step, **weights)
        if step % 100 == 0:
            print(f"{step}: loss {loss.item():.4f}, value {value.mean().item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--live", type=int, default=0, help="steps of a live crane before each update")
    parser.add_argument(
        "--keep", type=int, default=0, help="thousands of rows of the memory to save, at most 200"
    )
    main(Settings(**vars(parser.parse_args())))
