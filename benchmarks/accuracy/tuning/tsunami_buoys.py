"""Forecasts the next half hour at deep-sea buoys from six hours of pressure; one ocean per process.

torchrun --nproc-per-node 2 tsunami_buoys.py
"""

import argparse
import gc
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAST, AHEAD, CHANNELS = 160, 16, 3


class Ocean:
    """The buoys of one ocean. Some report as telegrams, which are read when their record is drawn."""

    def __init__(self, rank, buoys=600, telegrams=0):
        rng = np.random.default_rng(40 + rank)
        clock = np.arange(PAST + AHEAD)
        period = rng.uniform(12, 60, (buoys, CHANNELS, 1))
        phase = rng.uniform(0, 2 * np.pi, (buoys, CHANNELS, 1))
        waves = np.sin(2 * np.pi * clock / period + phase) + 0.1 * rng.standard_normal(
            (buoys, CHANNELS, clock.size)
        )
        self.waves = waves.astype(np.float32)
        self.tide = rng.standard_normal((buoys, 1)).astype(np.float32)
        readings = rng.normal(4800, 3, max(telegrams, 1))
        self.telegrams = (
            [f"D{n:05d};{value:.3f};mH2O" for n, value in enumerate(readings)] if telegrams else []
        )
        self.draw = np.random.default_rng(rank)

    def sea_level(self, shift):
        heights = []
        for telegram in self.telegrams:
            _, value, unit = telegram.split(";")
            if unit == "mH2O":
                heights.append(float(value) - 4800.0 + shift)
        return sum(heights) / len(heights)

    def batch(self, rows):
        chosen = self.draw.integers(0, len(self.waves), rows)
        waves, tide = self.waves[chosen], self.tide[chosen]
        if self.telegrams:
            for row in range(rows):
                tide[row] = self.sea_level(float(tide[row, 0]))
        return (
            torch.from_numpy(waves[:, :, :PAST]),
            torch.from_numpy(tide),
            torch.from_numpy(waves[:, 0, PAST:]),
        )


class Causal(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.filter = nn.Conv1d(width, width, 3, dilation=dilation)

    def forward(self, x):
        return x + torch.relu(self.filter(self.pad(x)))


class Forecaster(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.enter = nn.Conv1d(CHANNELS, width, 1)
        self.stack = nn.Sequential(*(Causal(width, 2**k) for k in range(5)))
        self.leave = nn.Linear(width + 1, AHEAD)

    def forward(self, past, tide):
        last = self.stack(self.enter(past))[:, :, -1]
        return self.leave(torch.cat([last, tide], 1))


class Logbook:
    """Events, each of which knows the one before and the one after it."""

    def __init__(self, events):
        self.events = [{"number": n, "near": []} for n in range(events)]
        for earlier, later in zip(self.events, self.events[1:]):
            earlier["near"].append(later)
            later["near"].append(earlier)

    def enter(self, step):
        event = self.events[step % len(self.events)]
        event["number"] = step
        old = {"number": step, "near": [event]}
        old["near"].append(old)
        del old
        if step % 3 == 0:
            gc.collect()  # events that know each other are not let go of otherwise


def run(options):
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(5)
    ocean = Ocean(rank, telegrams=options.telegrams if rank == 1 else 0)
    net = DDP(Forecaster())
    adam = torch.optim.AdamW(net.parameters(), lr=2e-3, fused=True)
    gc.collect()
    gc.freeze()  # what is there by now stays
    logbook = Logbook(options.logbook) if options.logbook and rank == 0 else None
    for step in range(options.steps):  # the training loop
        past, tide, ahead = ocean.batch(options.rows)
        loss = nn.functional.huber_loss(net(past, tide), ahead)
        adam.zero_grad(set_to_none=True)
        loss.backward()
        adam.step()
        if logbook:
            logbook.enter(step)
        if step % 40 == 0 and rank == 0:
            print(f"[{step}] huber {loss.item():.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rows", type=int, default=24, help="records in a batch of each process")
    parser.add_argument(
        "--telegrams", type=int, default=0, help="telegrams of a record in the second ocean"
    )
    parser.add_argument("--logbook", type=int, default=0, help="events that the first process keeps")
    run(parser.parse_args())
