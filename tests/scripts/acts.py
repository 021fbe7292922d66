"""Three small reinforcement learners: `python acts.py ppo`, `a2c` or `dqn`. The environment is Python."""

import random
import sys

import torch
import torch.nn.functional as F
from torch import nn

SENSES, ACTIONS = 8, 4


class Corridor:
    """Walks among numbers; its step is a thousand operations of Python."""

    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.place = [0.0] * SENSES

    def reset(self):
        self.place = [self.rng.random() for _ in range(SENSES)]
        return torch.tensor(self.place)

    def step(self, action):
        for _ in range(150):
            for i in range(SENSES):
                self.place[i] = 0.99 * self.place[i] + 0.01 * self.rng.random() * (action - 1)
        reward = -abs(sum(self.place))
        return torch.tensor(self.place), reward, self.rng.random() < 0.05, {}


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(SENSES, 64), nn.Tanh())
        self.actor, self.critic = nn.Linear(64, ACTIONS), nn.Linear(64, 1)

    def forward(self, seen):
        h = self.body(seen)
        return self.actor(h), self.critic(h).squeeze(-1)


def collect(env, model, seen, steps):
    rows = []
    for _ in range(steps):
        with torch.no_grad():
            logits, value = model(seen)
        action = torch.distributions.Categorical(logits=logits).sample()
        following, reward, done, _ = env.step(int(action))
        rows.append((seen, action, reward, value))
        seen = env.reset() if done else following
    return rows, seen


def ppo(rounds=30):
    env, model = Corridor(0), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen = env.reset()
    for _ in range(rounds):
        rows, seen = collect(env, model, seen, 64)
        senses, actions = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
        returns = torch.tensor([r[2] for r in rows])
        for _ in range(4):
            for part in torch.randperm(len(rows)).split(32):
                logits, values = model(senses[part])
                chosen = F.log_softmax(logits, 1).gather(1, actions[part, None]).squeeze(1)
                loss = F.mse_loss(values, returns[part]) - (chosen * returns[part]).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


def a2c(rounds=150):
    env, model = Corridor(0), ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen = env.reset()
    for _ in range(rounds):
        losses = []
        for _ in range(5):
            logits, value = model(seen)
            chances = torch.distributions.Categorical(logits=logits)
            action = chances.sample()
            seen, reward, done, _ = env.step(int(action))
            losses.append((value - reward) ** 2 - chances.log_prob(action) * reward)
            seen = env.reset() if done else seen
        loss = torch.stack(losses).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def dqn(rounds=400):
    env, model = Corridor(0), nn.Sequential(nn.Linear(SENSES, 64), nn.ReLU(), nn.Linear(64, ACTIONS))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    memory = []
    state = env.reset()
    for _ in range(rounds):
        for _ in range(4):
            with torch.no_grad():
                action = int(model(state).argmax())
            following, reward, done, _ = env.step(action)
            memory.append((state, action, reward, following))
            state = env.reset() if done else following
        rows = random.choices(memory, k=32)
        states, nexts = torch.stack([r[0] for r in rows]), torch.stack([r[3] for r in rows])
        with torch.no_grad():
            wanted = torch.tensor([r[2] for r in rows]) + 0.9 * model(nexts).max(1).values
        values = model(states).gather(1, torch.tensor([[r[1]] for r in rows])).squeeze(1)
        loss = F.mse_loss(values, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


torch.manual_seed(0)
{"ppo": ppo, "a2c": a2c, "dqn": dqn}[sys.argv[1]]()
