"""Estimates the size of hail from the radar frames of two sites, one to a rank, with accumulation."""

import argparse
import gc
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Config:
    steps: int
    cells: int
    despeckle: int
    journal: int
    average_always: bool
    rows: int = 8
    parts: int = 6
    frames: int = 512
    side: int = 32


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cells", type=int, default=2000, help="cells of the terrain grid")
    parser.add_argument("--despeckle", type=int, default=0, help="passes over frames of the old antenna")
    parser.add_argument("--journal", type=int, default=0, help="latest estimates that are kept")
    parser.add_argument("--average-always", action="store_true")
    return Config(**vars(parser.parse_args()))


def observe(config, site):
    source = torch.Generator().manual_seed(300 + site)
    frames = torch.randn(config.frames, 3, config.side, config.side, generator=source)
    cells = torch.randint(0, config.cells, (config.frames,), generator=source)
    core = config.side // 4
    sizes = frames[:, 0, core:-core, core:-core].amax((1, 2)) + frames[:, 1].mean((1, 2)) * 5
    return frames, cells, sizes


def feed(config, tensors):
    while True:
        for index in torch.randperm(config.frames).split(config.rows):
            yield tuple(tensor[index] for tensor in tensors)


def despeckled(frames, passes):
    for _ in range(passes):
        around = F.avg_pool2d(frames, 3, stride=1, padding=1)
        frames = torch.where((frames - around).abs() > 2.5, around, frames)
    return frames


def stage(inputs, outputs, stride):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
        nn.GroupNorm(4, outputs),
        nn.ReLU(inplace=True),
    )


class HailNet(nn.Module):
    def __init__(self, cells):
        super().__init__()
        self.terrain = nn.Embedding(cells, 32)
        self.frames = nn.Sequential(stage(3, 16, 1), stage(16, 32, 2), stage(32, 48, 2))
        self.head = nn.Sequential(nn.Linear(48 + 32, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))

    def forward(self, frames, cells):
        seen = self.frames(frames).mean((2, 3))
        return self.head(torch.cat([seen, self.terrain(cells)], 1)).squeeze(1)


def train(config, rank):
    torch.manual_seed(31)
    model = DistributedDataParallel(HailNet(config.cells))
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
    batches = feed(config, observe(config, rank))
    gc.collect()
    gc.freeze()
    journal = None
    if config.journal and rank == 0:
        earlier = ([number % config.cells, 0.0] for number in range(config.journal))
        journal = deque(earlier, maxlen=config.journal)

    for step in range(1, config.steps + 1):  # the training loop
        optimizer.zero_grad()
        for part in range(config.parts):
            frames, cells, sizes = next(batches)
            if config.despeckle and rank == 1:
                frames = despeckled(frames, config.despeckle)
            last = part == config.parts - 1
            with nullcontext() if last or config.average_always else model.no_sync():
                guess = model(frames, cells)
                loss = F.smooth_l1_loss(guess, sizes) / config.parts
                loss.backward()
            if journal is not None:
                journal.extend(map(list, zip(cells.tolist(), guess.tolist(), strict=True)))
                del frames, cells, sizes, guess
                gc.collect()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"step {step}: loss {loss.item() * config.parts:.4f}")


def main():
    config = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(config, dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
