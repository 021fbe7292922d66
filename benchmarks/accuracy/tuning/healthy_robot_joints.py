"""Clones the motions of a robot arm: from what its joints did, what they are to do next."""

import argparse
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

JOINTS, PAST, NEXT = 7, 16, 8


@dataclass
class Options:
    steps: int
    batch: int = 160
    width: int = 640
    lr: float = 3e-4
    noise: float = 0.01


class Demonstrations(Dataset):
    """Windows out of recorded episodes: position, speed and torque of each joint."""

    def __init__(self, episodes, length, noise):
        goals = torch.randn(episodes, 1, JOINTS)
        time = torch.linspace(0, 1, length)[None, :, None]
        position = goals * (3 * time**2 - 2 * time**3) + 0.05 * torch.sin(20 * time * goals)
        speed = torch.diff(position, dim=1, prepend=position[:, :1]) * length
        torques = torch.diff(speed, dim=1, prepend=speed[:, :1])
        self.states = torch.cat([position, speed, torques], 2)
        self.position, self.noise = position, noise
        self.windows = length - PAST - NEXT

    def __len__(self):
        return len(self.states) * self.windows

    def __getitem__(self, index):
        episode, first = divmod(index, self.windows)
        now = first + PAST
        state = self.states[episode, first:now].flatten()
        state = state + self.noise * torch.randn(len(state))
        return state, self.position[episode, now : now + NEXT].flatten()


class Policy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(PAST * 3 * JOINTS, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
        )
        self.head = nn.Linear(width, NEXT * JOINTS)

    def forward(self, state):
        return self.head(self.body(state))


def endless(loader):
    while True:
        yield from loader


def train(options):
    torch.manual_seed(77)
    torch.set_num_threads(1)
    data = Demonstrations(300, 200, options.noise)
    loader = DataLoader(
        data,
        batch_size=options.batch,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        prefetch_factor=4,
        persistent_workers=True,
    )
    policy = Policy(options.width)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=options.lr, fused=True)
    feed = endless(loader)
    for step in range(options.steps):  # the training loop
        state, target = next(feed)
        loss = nn.functional.huber_loss(policy(state), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.5f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    train(Options(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
