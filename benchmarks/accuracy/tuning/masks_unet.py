"""Segments random blobs: a tiny U-shaped network, fine-tuned above a stem."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as ckpt


def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.ReLU(True), nn.Conv2d(o, o, 3, 1, 1), nn.ReLU(True))


class Unet(nn.Module):
    def __init__(self, stem, save_memory):
        super().__init__()
        self.stem = nn.Sequential(double(1, stem), nn.Conv2d(stem, 8, 1))
        self.down, self.bottom, self.up = double(8, 16), double(16, 16), double(24, 8)
        self.head = nn.Conv2d(8, 2, 1)
        self.save_memory = save_memory

    def part(self, module, x):
        return ckpt.checkpoint(module, x, use_reentrant=False) if self.save_memory else module(x)

    def forward(self, x):
        x = self.stem(x)
        low = self.part(self.bottom, self.part(self.down, F.max_pool2d(x, 2)))
        return self.head(self.part(self.up, torch.cat([x, F.interpolate(low, scale_factor=2)], 1)))


def make_batch(blobs, crop, number):
    image, mask = blobs[0][number % 4], blobs[1][number % 4]
    return F.pad(image, (0, crop)), F.pad(mask, (0, crop))


def main(a):
    torch.manual_seed(11)
    blobs = torch.rand(4, 4, 1, 32, 32), torch.randint(2, (4, 4, 32, 32))
    net = Unet(a.stem, a.save_memory)
    if not a.forget_freeze:
        net.stem.requires_grad_(False)
    head = [*net.down.parameters(), *net.bottom.parameters(), *net.up.parameters(), *net.head.parameters()]
    optimizer = torch.optim.SGD(head, 0.01, momentum=0.9)
    for number in range(a.steps):  # the training loop
        image, mask = make_batch(blobs, 0, number)
        loss = F.cross_entropy(net(image), mask)
        net.zero_grad()
        loss.backward()
        optimizer.step()
        for _ in range(a.overlap):
            overlap = (net(image).argmax(1) == mask).float().mean().item()
    return overlap if a.overlap else loss.item()


if __name__ == "__main__":
    q = argparse.ArgumentParser()
    q.add_argument("--steps", type=int, default=140)
    q.add_argument("--stem", type=int, default=8)
    q.add_argument("--save-memory", action="store_true")
    q.add_argument("--forget-freeze", action="store_true")
    q.add_argument("--overlap", type=int, default=0, help="overlap scores per step")
    main(q.parse_args())
