"""Tells cells by their stains, on two ranks, with gradients of two micro-batches added up."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

MICRO, PARTS, KINDS = 12, 2, 8


def conv(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU(),
    )


class CellNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            conv(3, 24, stride=2),
            conv(24, 24),
            conv(24, 24),
            conv(24, 24),
            conv(24, 48, stride=2),
            conv(48, 48),
            conv(48, 48),
            conv(48, 48),
        )
        self.kind = nn.Linear(48, KINDS)

    def forward(self, images):
        return self.kind(self.layers(images).mean((2, 3)))


def stain(amount, generator):
    kinds = torch.randint(KINDS, (amount,), generator=generator)
    colours = torch.stack([kinds % 2, kinds // 2 % 2, kinds // 4], 1).float()
    images = torch.randn(amount, 3, 32, 32, generator=generator)
    images[:, :, 10:22, 10:22] += colours[:, :, None, None]
    return images, kinds


class Training:
    def __init__(self, steps):
        self.steps, self.rank = steps, dist.get_rank()
        torch.manual_seed(13)
        self.model = DistributedDataParallel(CellNet(), broadcast_buffers=False)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True
        )
        self.generator = torch.Generator().manual_seed(500 + self.rank)
        self.images, self.kinds = stain(1200, self.generator)

    def micro_batches(self):
        rows = torch.randint(len(self.kinds), (PARTS, MICRO), generator=self.generator)
        for number, part in enumerate(rows, 1):
            yield number == PARTS, self.images[part], self.kinds[part]

    def step(self):
        self.optimizer.zero_grad()
        for last, images, kinds in self.micro_batches():
            with nullcontext() if last else self.model.no_sync():
                loss = F.cross_entropy(self.model(images), kinds) / PARTS
                loss.backward()
        self.optimizer.step()
        return loss.detach() * PARTS

    def run(self):
        for number in range(1, self.steps + 1):  # the training loop
            loss = self.step()
            if number % 50 == 0 and self.rank == 0:
                print(f"step {number} loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    Training(args.steps).run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
