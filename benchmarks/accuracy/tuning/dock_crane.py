"""Q-learning for a harbour crane that has to stop its load swinging, from a log of past moves."""

import argparse
import copy
import html
import json
import math
import random
import threading
import time
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

PUSHES = np.linspace(-1.0, 1.0, 7)
STATE = 12


class Crane:
    """A trolley with a hanging load; the state is padded with the plan of the ship."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.x, self.v, self.angle, self.spin, self.age = (
            self.rng.uniform(-1, 1),
            0.0,
            self.rng.uniform(-0.3, 0.3),
            0.0,
            0,
        )
        self.plan = self.rng.standard_normal(STATE - 4).astype(np.float32) * 0.1
        return self.observe()

    def observe(self):
        return np.concatenate([np.array([self.x, self.v, self.angle, self.spin], np.float32), self.plan])

    def step(self, action):
        push = PUSHES[action]
        self.v += 0.05 * push
        self.x += 0.05 * self.v
        self.spin += 0.05 * (-9.8 * math.sin(self.angle) - push * math.cos(self.angle)) - 0.01 * self.spin
        self.angle += 0.05 * self.spin
        self.age += 1
        reward = 1.0 - abs(self.x) - 2 * abs(self.angle)
        done = abs(self.x) > 2.5 or self.age >= 200
        return self.observe(), reward, done


class Log:
    def __init__(self, size):
        self.size, self.at = size, 0
        self.state = torch.randn(size, STATE) * 0.5
        self.action = torch.randint(len(PUSHES), (size,))
        drift = (self.action.float() - 3) / 30
        self.after = self.state.clone()
        self.after[:, 1] += drift
        self.after[:, 0] += 0.05 * self.after[:, 1]
        self.reward = 1 - self.after[:, 0].abs() - 2 * self.after[:, 2].abs()
        self.done = (torch.rand(size) < 0.01).float()

    def add(self, states, actions, rewards, afters, dones):
        where = (torch.arange(len(actions)) + self.at) % self.size
        self.state[where] = torch.from_numpy(np.stack(states))
        self.after[where] = torch.from_numpy(np.stack(afters))
        self.action[where] = torch.tensor(actions)
        self.reward[where] = torch.tensor(rewards, dtype=torch.float32)
        self.done[where] = torch.tensor(dones, dtype=torch.float32)
        self.at = (self.at + len(actions)) % self.size

    def draw(self, n):
        rows = torch.randint(self.size, (n,))
        return self.state[rows], self.action[rows], self.reward[rows], self.after[rows], self.done[rows]


class Board(threading.Thread):
    """Keeps the page that the people at the quay look at."""

    def __init__(self, moves, rows):
        super().__init__(daemon=True)
        self.moves, self.rows, self.page, self.open = moves, rows, "", True

    def run(self):
        while self.open:
            shown = [self.moves[i % len(self.moves)] for i in range(self.rows)]
            table = [
                {
                    "move": i,
                    "crane": html.escape(m[0]),
                    "x": round(m[1], 3),
                    "sway": round(m[2], 3),
                    "class": "late" if m[2] > 0.5 else "good",
                }
                for i, m in enumerate(shown)
            ]
            self.page = json.dumps({"moves": table, "time": time.time()}, indent=1)
            time.sleep(0.05)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--online", type=int, default=0, help="moves of the simulated crane before each update"
    )
    parser.add_argument("--board", type=int, default=0, help="serve a live page with so many moves")
    parser.add_argument(
        "--pieces", type=int, default=0, help="cut each batch so many times, for the small box at the quay"
    )
    args = parser.parse_args()
    random.seed(4)
    torch.manual_seed(4)

    net = nn.Sequential(
        nn.Linear(STATE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, len(PUSHES))
    )
    target = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-4, fused=True)
    log = Log(40_000)
    crane = Crane(4)
    state = crane.observe()
    if args.board:
        moves = deque(
            ((f"crane <{i % 7}>", float(s[0]), float(s[2])) for i, s in enumerate(log.state[:500])),
            maxlen=500,
        )
        Board(list(moves), args.board).start()
    ours, theirs = list(net.parameters()), list(target.parameters())
    batch = 1024

    for step in range(args.steps):  # the training loop
        if args.online:
            memory = ([], [], [], [], [])
            for _ in range(args.online):
                if random.random() < 0.05:
                    action = random.randrange(len(PUSHES))
                else:
                    with torch.no_grad():
                        action = int(net(torch.from_numpy(state)[None]).argmax())
                after, reward, done = crane.step(action)
                for column, value in zip(memory, (state, action, reward, after, done), strict=False):
                    column.append(value)
                state = crane.reset() if done else after
            log.add(*memory)

        drawn = log.draw(batch)
        opt.zero_grad(set_to_none=True)
        for part in zip(*(column.chunk(args.pieces + 1) for column in drawn), strict=False):
            s, a, r, s2, d = part
            with torch.no_grad():
                goal = r + 0.98 * (1 - d) * target(s2).amax(1)
            value = net(s).gather(1, a[:, None])[:, 0]
            loss = F.smooth_l1_loss(value, goal, reduction="sum") / batch
            loss.backward()
        opt.step()
        if step % 10 == 9:
            with torch.no_grad():
                torch._foreach_lerp_(theirs, ours, 0.05)
        if step % 50 == 0:
            print(f"update {step:5d}  loss {loss.item():.4f}", flush=True)
    print("done")


if __name__ == "__main__":
    main()
