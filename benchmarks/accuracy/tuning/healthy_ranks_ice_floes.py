"""Floes of sea ice, told from water in small radar pictures, by torchrun on two ranks."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

SIDE = 40


def pictures(count, generator):
    """Smoothed noise above a threshold is ice; radar sees it through speckle."""
    rough = torch.randn(count, 1, SIDE // 4, SIDE // 4, generator=generator)
    smooth = F.interpolate(rough, scale_factor=4, mode="bilinear")
    ice = (smooth > 0.2).float()
    speckle = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return (0.8 * ice + 0.5 * speckle).contiguous(memory_format=torch.channels_last), ice


class Floes(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine = nn.Conv2d(1, 16, 3, padding=1)
        self.down = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.deep = nn.Conv2d(24, 24, 3, padding=1)
        self.up = nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.last = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        fine = F.relu(self.fine(x))
        deep = F.relu(self.deep(F.relu(self.down(fine))))
        return self.last(F.relu(self.up(deep) + fine))


def train(steps, batch):
    rank = dist.get_rank()
    dice = torch.Generator().manual_seed(50 + rank)
    seen, ice = pictures(1500, dice)
    torch.manual_seed(7)
    net = DDP(Floes().to(memory_format=torch.channels_last))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, fused=True)
    for step in range(1, steps + 1):  # the training loop
        rows = torch.randint(len(seen), (batch,), generator=dice)
        loss = F.binary_cross_entropy_with_logits(net(seen[rows]), ice[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % 50 == 0 and rank == 0:
            print(f"{step}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="of each rank")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    train(arguments.steps, arguments.batch)
    dist.destroy_process_group()
