"""Estimates fuel flow from windows of flight-recorder channels, one process for each part of the fleet."""

import argparse
import gc
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CHANNELS = 14
WINDOW = 160
CODE = 128
BATCHES = 30  # in an epoch, on every rank


class Stage(nn.Module):
    def __init__(self, inputs, outputs, kernel):
        super().__init__()
        self.reduce = nn.Conv1d(inputs, outputs, kernel, stride=2, padding=kernel // 2, bias=False)
        self.norm = nn.GroupNorm(8, outputs)
        self.mix = nn.Conv1d(outputs, outputs, 1)

    def forward(self, x):
        x = F.silu(self.norm(self.reduce(x)))
        return x + F.silu(self.mix(x))


class BurnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(Stage(CHANNELS, 64, 7), Stage(64, 96, 5), Stage(96, CODE, 3))
        self.head = nn.Sequential(nn.Linear(CODE, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, signals):
        code = self.stages(signals).mean(2)
        return self.head(code).squeeze(1), code


class Fleet:
    """The windows that one rank looks after."""

    def __init__(self, windows, seed):
        draw = torch.Generator().manual_seed(seed)
        self.signals = torch.randn(windows, CHANNELS, WINDOW, generator=draw)
        thrust, drag = self.signals[:, :4].mean((1, 2)), self.signals[:, 4:7].mean((1, 2))
        self.burn = 10 * thrust + 30 * drag.square() + 1

    def batches(self, rows):
        while True:
            for part in torch.randperm(len(self.burn)).split(rows):
                yield self.signals[part], self.burn[part]


@dataclass(slots=True)
class Note:
    flight: str
    legs: list
    phases: dict


class Journal:
    """What dispatch gets to see of the flights."""

    def __init__(self, flights):
        self.notes = [self.note(number) for number in range(flights)]

    @staticmethod
    def note(number):
        return Note(f"FLT{number:07d}", [number, number + 1], {"climb": [0, 20], "cruise": [20, WINDOW]})

    def add(self, step):
        self.notes[step % len(self.notes)] = self.note(step)
        gc.collect()


class Trainer:
    def __init__(self, options):
        self.options = options
        self.rank = dist.get_rank()
        rows = round(options.rows * (1 + options.hub)) if self.rank == 0 else options.rows
        self.feed = Fleet(rows * BATCHES, seed=70 + self.rank).batches(rows)
        self.net = DistributedDataParallel(BurnNet())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=5e-4, fused=True)
        self.library = None
        if self.rank == 0 and options.library:
            self.library = F.normalize(torch.randn(options.library, CODE), dim=1)
        gc.collect()
        gc.freeze()
        self.journal = Journal(options.journal) if self.rank == 0 and options.journal else None

    def likeness(self, code):
        """How near the codes are to those of known sensor defects."""
        near = F.normalize(code, dim=1) @ self.library.T
        return torch.logsumexp(near / 0.2, dim=1).mean()

    def step(self, signals, burn):
        estimate, code = self.net(signals)
        loss = F.smooth_l1_loss(estimate, burn)
        if self.library is not None:
            loss = loss + 0.02 * self.likeness(code)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self):
        for step in range(1, self.options.steps + 1):  # the training loop
            loss = self.step(*next(self.feed))
            if self.journal is not None:
                self.journal.add(step)
            if step % 50 == 0 and self.rank == 0:
                print(f"step {step} loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--hub", type=float, default=0, help="by how much the hub's fleet is larger")
    parser.add_argument("--journal", type=int, default=0, help="flights in dispatch's journal")
    parser.add_argument("--library", type=int, default=0, help="codes of known sensor defects")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    dist.init_process_group("gloo")
    Trainer(options).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
