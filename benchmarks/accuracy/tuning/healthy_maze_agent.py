# Double DQN for agents that look for the way out of small mazes. All mazes are stepped at once, as tensors.
import argparse
import random

import torch
from torch import nn
from torch.nn import functional as F

N = 11  # mazes are N x N
MOVES = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1]])


class Mazes:
    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        self.wall = torch.rand(count, N, N, generator=g) < 0.22
        self.wall[:, 0], self.wall[:, -1], self.wall[:, :, 0], self.wall[:, :, -1] = True, True, True, True
        self.wall[:, 1, 1] = self.wall[:, N - 2, N - 2] = False
        self.at = torch.ones(count, 2, dtype=torch.long)
        self.age = torch.randint(0, 60, (count,), generator=g)
        self.rows = torch.arange(count)
        self.planes = torch.zeros(count, 3, N, N)
        self.planes[:, 0] = self.wall
        self.planes[:, 2, N - 2, N - 2] = 1

    def look(self):
        view = self.planes.clone()
        view[self.rows, 1, self.at[:, 0], self.at[:, 1]] = 1
        return view

    def step(self, action):
        to = self.at + MOVES[action]
        hit = self.wall[self.rows, to[:, 0], to[:, 1]]
        self.at = torch.where(hit[:, None], self.at, to)
        out = (self.at == N - 2).all(1)
        self.age += 1
        over = out | (self.age > 60)
        reward = out.float() - 0.01 - 0.02 * hit
        self.at[over] = 1
        self.age[over] = 0
        return reward, out


class Memory:
    """A ring of transitions; views are kept as bytes."""

    def __init__(self, size):
        self.view = torch.zeros(size, 3, N, N, dtype=torch.uint8)
        self.then = torch.zeros_like(self.view)
        self.action = torch.zeros(size, dtype=torch.long)
        self.reward, self.done = torch.zeros(size), torch.zeros(size)
        self.size, self.head, self.full = size, 0, 0

    def add(self, view, action, reward, then, done):
        n = len(view)
        part = slice(self.head, self.head + n)
        for store, new in zip(
            (self.view, self.action, self.reward, self.then, self.done), (view, action, reward, then, done)
        ):
            store[part] = new
        self.head = (self.head + n) % self.size
        self.full = min(self.full + n, self.size)

    def draw(self, n):
        i = torch.randint(self.full, (n,))
        return self.view[i].float(), self.action[i], self.reward[i], self.then[i].float(), self.done[i]


class Q(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.value, self.edge = nn.Linear(16 * 25, 1), nn.Linear(16 * 25, 4)

    def forward(self, x):
        x = self.body(x)
        edge = self.edge(x)
        return self.value(x) + edge - edge.mean(1, keepdim=True)


def run(steps):
    random.seed(4)
    torch.manual_seed(4)
    world, memory = Mazes(16, 9), Memory(16 * 512)
    net, target = Q(), Q().requires_grad_(False)
    target.load_state_dict(net.state_dict())
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, fused=True)
    view = world.look()
    for _ in range(40):  # fill the memory a little by walking about
        action = torch.randint(4, (16,))
        reward, done = world.step(action)
        then = world.look()
        memory.add(view, action, reward, then, done)
        view = then

    escapes = torch.zeros(())
    for step in range(steps):  # the training loop
        eps = max(0.05, 1 - step / 150)
        if random.random() < eps:
            action = torch.randint(4, (16,))
        else:
            with torch.no_grad():
                action = net(view).argmax(1)
        reward, done = world.step(action)
        then = world.look()
        memory.add(view, action, reward, then, done)
        view = then
        escapes += done.sum()

        s, a, r, s2, end = memory.draw(64)
        with torch.no_grad():
            best = net(s2).argmax(1, keepdim=True)
            goal = r + 0.97 * (1 - end) * target(s2).gather(1, best)[:, 0]
        loss = F.smooth_l1_loss(net(s).gather(1, a[:, None])[:, 0], goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 25 == 0:
            target.load_state_dict(net.state_dict())
        if step % 50 == 49:
            print(f"step {step + 1}: loss {loss.item():.4f}, {int(escapes)} ways out, eps {eps:.2f}")
            escapes.zero_()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=200)
    run(p.parse_args().steps)
