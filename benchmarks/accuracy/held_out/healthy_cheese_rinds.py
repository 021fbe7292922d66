"""Segments the rind of a cheese wheel in ultrasound lines: core, rind, crack. Compiled, with a pulse."""

import argparse
import threading
import time

import torch
from torch import nn


class Echo(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.first = nn.Conv1d(1, width, 7, padding=3)
        self.blocks = nn.ModuleList(
            nn.Conv1d(width, width, 5, padding=2 * 2**i, dilation=2**i) for i in range(4)
        )
        self.last = nn.Conv1d(width, 3, 1)

    def forward(self, line):
        x = torch.relu(self.first(line))
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.last(x)


class Pulse(threading.Thread):
    """Tells, twice in a second, that the program lives; someone may ask for its age."""

    def __init__(self):
        super().__init__(daemon=True)
        self.stop, self.seen, self.step = threading.Event(), time.monotonic(), 0

    def run(self):
        while not self.stop.wait(0.5):
            self.seen = time.monotonic()


def wheels(count=768, depth=256):
    ends = torch.randint(24, 90, (count, 1))
    where = torch.arange(depth)[None]
    truth = (where < ends).long()
    cracks = torch.randint(100, 240, (count, 1))
    truth[(where - cracks).abs() < 4] = 2
    lines = truth.float() * 0.8 + 0.4 * torch.randn(count, depth)
    return lines[:, None], truth


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(15)
    lines, truth = wheels()
    net = Echo()
    compiled = torch.compile(net, backend="aot_eager", dynamic=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=args.steps + 1)
    pulse = Pulse()
    pulse.start()

    for pulse.step in range(args.steps):  # the training loop
        some = torch.randint(len(lines), (16,))
        loss = nn.functional.cross_entropy(compiled(lines[some]), truth[some])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if pulse.step % 50 == 0:
            print(f"wheel {pulse.step}: {loss.item():.4f}", flush=True)
    pulse.stop.set()


if __name__ == "__main__":
    main()
