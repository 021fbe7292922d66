"""Marks kelp in satellite chips on two ranks; gradients are accumulated and averaged once in a step."""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BANDS, SIDE, CHIPS, ROWS, ACCUMULATE = 4, 32, 480, 6, 4


class CanopyNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Conv2d(BANDS, width, 3, padding=1, bias=False)
        self.stem_norm = nn.GroupNorm(4, width)
        self.near = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.near_norm = nn.GroupNorm(4, width)
        self.far = nn.Conv2d(width, width, 3, padding=2, dilation=2, bias=False)
        self.far_norm = nn.GroupNorm(4, width)
        self.mask = nn.Conv2d(width, 1, 1)

    def forward(self, chips):
        x = self.stem_norm(self.stem(chips)).relu()
        x = x + self.near_norm(self.near(x)).relu()
        x = x + self.far_norm(self.far(x)).relu()
        return self.mask(x).squeeze(1)


def make_chips(rank):
    source = torch.Generator().manual_seed(1000 + rank)
    chips = torch.randn(CHIPS, BANDS, SIDE, SIDE, generator=source)
    index = (chips[:, 3] - chips[:, 0]).unsqueeze(1)
    canopy = nn.functional.avg_pool2d(index, 5, stride=1, padding=2).squeeze(1) > 0.15
    return chips, canopy.float()


class CanopyRun:
    def __init__(self, steps):
        self.steps, self.rank, self.ranks = steps, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(3)
        self.model = DDP(CanopyNet())
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=True
        )
        self.chips, self.canopy = make_chips(self.rank)
        self.criterion = nn.BCEWithLogitsLoss()
        self.picks = self.shuffled()

    def shuffled(self):
        while True:
            yield from torch.randperm(CHIPS).split(ROWS)

    def backward(self, pick, sync):
        with contextlib.nullcontext() if sync else self.model.no_sync():
            loss = self.criterion(self.model(self.chips[pick]), self.canopy[pick]) / ACCUMULATE
            loss.backward()
        return loss.detach()

    def report(self, step, loss):
        dist.all_reduce(loss)
        if self.rank == 0:
            print(f"step {step:4d}  loss {loss.item() / self.ranks:.4f}")

    def run(self):
        for step in range(1, self.steps + 1):  # the training loop
            self.optimizer.zero_grad()
            loss = torch.zeros(())
            for number in range(ACCUMULATE):
                loss += self.backward(next(self.picks), sync=number == ACCUMULATE - 1)
            self.optimizer.step()
            if step % 50 == 0:
                self.report(step, loss)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start with torchrun --nproc-per-node 2")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    CanopyRun(args.steps).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
