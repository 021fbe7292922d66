"""Strings of a marionette: a next-pose model with the average of its weights, for the puppet theatre's archive.

Losses stay tensors until they are printed, the average is made in one go for all weights, the unseen scenes
are looked at seldom.
"""

import argparse
import copy
from collections import deque

import torch
from torch import nn

STRINGS, POSES = 11, 24


def scenes(count):
    phase = torch.rand(count, 1, STRINGS) * 6.28
    pace = 0.1 + 0.3 * torch.rand(count, 1, STRINGS)
    time = torch.arange(POSES + 1.0).view(1, -1, 1)
    return torch.sin(phase + pace * time) + 0.02 * torch.randn(count, POSES + 1, STRINGS)


class Puppet(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.enter = nn.Linear(STRINGS, width)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 3, groups=1) for _ in range(4))
        self.leave = nn.Linear(width, STRINGS)

    def forward(self, poses):
        x = self.enter(poses).transpose(1, 2)
        for mix in self.mix:
            x = x + nn.functional.gelu(mix(nn.functional.pad(x, (2, 0))))
        return poses + self.leave(x.transpose(1, 2))


class Average:
    def __init__(self, net, keep=0.995):
        self.net, self.keep = copy.deepcopy(net).requires_grad_(False), keep
        self.mine, self.theirs = list(self.net.parameters()), list(net.parameters())

    @torch.no_grad()
    def update(self):
        torch._foreach_lerp_(self.mine, self.theirs, 1 - self.keep)


def miss(net, scene):
    return nn.functional.mse_loss(net(scene[:, :-1]), scene[:, 1:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--scenes", type=int, default=32)
    args = parser.parse_args()
    torch.manual_seed(7)
    seen, unseen = scenes(3000), scenes(64)
    net = Puppet()
    average = Average(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=20)
    recent = deque(maxlen=50)
    for step in range(1, args.steps + 1):  # the training loop
        optimizer.zero_grad()
        loss = miss(net, seen[torch.randint(len(seen), (args.scenes,))])
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        warm.step()
        average.update()
        recent.append(loss.detach())
        if step % 50 == 0:
            print(f"{step}: {torch.stack(tuple(recent)).mean().item():.4f}")
        if step % 100 == 0:
            with torch.no_grad():
                print(f"unseen: {miss(average.net, unseen).item():.4f}")


if __name__ == "__main__":
    main()
