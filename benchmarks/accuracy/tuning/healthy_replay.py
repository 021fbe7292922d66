"""Q-learning in 64 simulated rooms at once; what was lived through is kept in tensors."""

import argparse
import copy

import torch
from torch import nn

STATE, ACTIONS, ROOMS = 48, 6, 64


class Memory:
    def __init__(self, size):
        self.size, self.filled, self.at = size, 0, 0
        self.states, self.following = torch.zeros(size, STATE), torch.zeros(size, STATE)
        self.actions, self.rewards = torch.zeros(size, dtype=torch.long), torch.zeros(size)

    def add(self, state, action, reward, following):
        here = slice(self.at, self.at + len(state))
        self.states[here], self.actions[here] = state, action
        self.rewards[here], self.following[here] = reward, following
        self.at = (self.at + len(state)) % self.size
        self.filled = min(self.size, self.filled + len(state))

    def draw(self, amount):
        index = torch.randint(self.filled, (amount,))
        return self.states[index], self.actions[index], self.rewards[index], self.following[index]


class Rooms:
    def __init__(self):
        self.push = torch.randn(ACTIONS, STATE) / 4
        self.state = torch.randn(ROOMS, STATE)

    def step(self, action):
        self.state = (0.9 * self.state + self.push[action]).tanh()
        return self.state, self.state[:, 0]


def q_network():
    return nn.Sequential(
        nn.Linear(STATE, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, ACTIONS)
    )


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=160)
    steps = cli.parse_args().steps
    torch.manual_seed(13)
    online = q_network()
    target = copy.deepcopy(online).requires_grad_(False)
    optimizer = torch.optim.Adam(online.parameters(), lr=3e-4, fused=True)
    rooms, memory = Rooms(), Memory(64 * 256)
    for step in range(steps):  # the training loop
        before = rooms.state
        with torch.no_grad():
            action = online(before).argmax(1)
        after, reward = rooms.step(action)
        memory.add(before, action, reward, after)

        state, action, reward, following = memory.draw(1024)
        with torch.no_grad():
            wanted = reward + 0.97 * target(following).amax(1)
        value = online(state).gather(1, action[:, None]).squeeze(1)
        loss = nn.functional.smooth_l1_loss(value, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 24:
            target.load_state_dict(online.state_dict())
            print(step, loss.item(), reward.mean().item())


if __name__ == "__main__":
    main()
