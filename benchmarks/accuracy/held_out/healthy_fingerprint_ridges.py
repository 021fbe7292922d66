"""Learns fingerprints without names: two noisy views of a print should agree, others should not.

The encoder is called twice a step, on two different views. A slow copy of the weights follows it. The
weights are written by a thread of their own, now and then.
"""

import argparse
import copy
import io
import math
import queue
import threading

import torch
import torch.nn.functional as F
from torch import nn


def ridges(count, side=32):
    angle = torch.rand(count, 1, 1) * math.pi
    swirl = torch.randn(count, 1, 1) * 2
    axis = torch.linspace(-1, 1, side)
    y, x = axis[:, None], axis[None, :]
    turned = x * torch.cos(angle + swirl * (x**2 + y**2)) + y * torch.sin(angle + swirl * (x**2 + y**2))
    return torch.sin(22 * turned)[:, None]


class Scribe(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.jobs = queue.SimpleQueue()
        self.written = 0

    def run(self):
        while (state := self.jobs.get()) is not None:
            torch.save(state, paper := io.BytesIO())
            self.written += paper.tell()


class Encoder(nn.Module):
    def __init__(self, wide=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, wide, 5, 2, 2),
            nn.ReLU(),
            nn.Conv2d(wide, 2 * wide, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * wide, 4 * wide, 3, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.head = nn.Linear(4 * wide * 16, 64)

    def forward(self, prints):
        return F.normalize(self.head(self.body(prints)), dim=1)


def view(prints):
    shift = torch.randint(-3, 4, (2,)).tolist()
    return torch.roll(prints, shift, (2, 3)) + 0.3 * torch.randn_like(prints)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    torch.manual_seed(10)
    prints = ridges(3000)
    encoder = Encoder()
    slow = copy.deepcopy(encoder).requires_grad_(False)
    pairs = list(slow.parameters()), list(encoder.parameters())
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3, fused=True)
    scribe = Scribe()
    scribe.start()
    same = torch.arange(64)
    for step in range(1, steps + 1):  # the training loop
        some = prints[torch.randint(len(prints), (64,))]
        left, right = encoder(view(some)), encoder(view(some))
        likeness = left @ right.T / 0.1
        loss = F.cross_entropy(likeness, same) + F.cross_entropy(likeness.T, same)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(*pairs, 0.02)
        if step % 80 == 0:
            scribe.jobs.put({name: value.clone() for name, value in slow.state_dict().items()})
            print(f"step {step}: loss {loss.item():.3f}")
    scribe.jobs.put(None)
    scribe.join()
    print(scribe.written, "bytes written")


if __name__ == "__main__":
    main()
