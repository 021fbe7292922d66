# Gait of a horse (walk, trot, canter, gallop) from the pressure mat under its saddle.
# Two stables train together: torchrun --nproc-per-node 2 saddle_pressure.py
import argparse
import contextlib
import copy
import os

import torch
import torch.distributed as dist
from torch import nn

FRAMES, CELLS, GAITS, PARTS = 32, 64, 4, 4


class Mixer(nn.Module):
    def __init__(self, frames, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.time = nn.Sequential(nn.Linear(frames, 2 * frames), nn.GELU(), nn.Linear(2 * frames, frames))
        self.place = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.time(self.first(x).transpose(1, 2)).transpose(1, 2)
        return x + self.place(self.second(x))


class Mat(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.stem = nn.Linear(CELLS, width)
        self.mixers = nn.Sequential(*[Mixer(FRAMES, width) for _ in range(depth)])
        self.verdict = nn.Sequential(
            nn.Flatten(), nn.Linear(FRAMES * width, 192), nn.ReLU(), nn.Linear(192, GAITS)
        )

    def forward(self, rides):
        return self.verdict(self.mixers(self.stem(rides)))


class Stable:
    """The rides of one stable, all in memory."""

    def __init__(self, number, rides=2048):
        g = torch.Generator().manual_seed(number)
        self.gaits = torch.randint(GAITS, (rides,), generator=g)
        beat = torch.arange(FRAMES)[None, :, None] * (self.gaits[:, None, None] + 1) * 0.4
        where = torch.rand(rides, 1, CELLS, generator=g) * 3
        self.rides = (beat + where).sin() + 0.3 * torch.randn(rides, FRAMES, CELLS, generator=g)
        self.g = g

    def some(self, n):
        which = torch.randint(len(self.gaits), (n,), generator=self.g)
        return self.rides[which], self.gaits[which]


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank = int(os.environ["RANK"])
        self.net = Mat()
        self.team = nn.parallel.DistributedDataParallel(self.net, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01, momentum=0.9, fused=True)
        self.stable = Stable(self.rank)
        self.memories = [copy.deepcopy(self.net).requires_grad_(False) for _ in range(args.memories)]

    def hold(self, part):
        """The context of a part of a batch."""
        if part == PARTS - 1 or self.args.settle:
            return contextlib.nullcontext()
        return self.team.no_sync()

    def remember(self):
        for age, memory in enumerate(self.memories):
            keep = 1 - 0.1 / (age + 1)
            for old, new in zip(memory.parameters(), self.net.parameters(), strict=True):
                old.mul_(keep).add_(new.detach(), alpha=1 - keep)

    def step(self):
        self.optimizer.zero_grad()
        for part in range(PARTS):
            rides, gaits = self.stable.some(self.args.rows)
            with self.hold(part):
                loss = nn.functional.cross_entropy(self.team(rides), gaits) / PARTS
                loss.backward()
        self.optimizer.step()
        self.remember()
        return loss

    def fit(self):
        for step in range(self.args.steps):  # the training loop
            loss = self.step()
            if step % 40 == 0 and self.rank == 0:
                print(f"step {step}, loss {PARTS * loss.item():.3f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=24, help="rides in each of the four parts of a batch")
    parser.add_argument("--settle", action="store_true", help="settle accounts after every part")
    parser.add_argument("--memories", type=int, default=0, help="smoothed versions of the net to keep")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(5)
    dist.init_process_group("gloo")
    Trainer(args).fit()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
