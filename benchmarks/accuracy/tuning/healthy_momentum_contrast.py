"""Contrasts two views of an image; the keys come from a slow copy of the encoder and are kept in a ring."""

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import nn


def encoder():
    def stage(inputs, outputs):
        convolution = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    return nn.Sequential(
        stage(3, 24), stage(24, 48), stage(48, 96), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 64)
    )


def view(images):
    """A random crop, the same for the batch, perhaps mirrored, and a change of brightness."""
    top, left = torch.randint(8, (2,)).tolist()
    crop = images[:, :, top : top + 40, left : left + 40]
    if torch.rand(()) < 0.5:
        crop = crop.flip(3)
    return crop * torch.empty(len(crop), 1, 1, 1).uniform_(0.7, 1.3)


class MomentumContrast:
    def __init__(self, ring=2048, momentum=0.99, temperature=0.1):
        self.query_net = encoder()
        self.key_net = copy.deepcopy(self.query_net).requires_grad_(False)
        self.slow, self.fast = list(self.key_net.parameters()), list(self.query_net.parameters())
        self.ring, self.place = F.normalize(torch.randn(ring, 64), dim=1), 0
        self.momentum, self.temperature = momentum, temperature

    @torch.no_grad()
    def keys(self, images):
        torch._foreach_lerp_(self.slow, self.fast, 1 - self.momentum)
        return F.normalize(self.key_net(images), dim=1)

    def loss(self, images):
        query, key = F.normalize(self.query_net(view(images)), dim=1), self.keys(view(images))
        positive = (query * key).sum(1, keepdim=True)
        scores = torch.cat([positive, query @ self.ring.T], dim=1) / self.temperature
        return F.cross_entropy(scores, torch.zeros(len(key), dtype=torch.long)), key

    def remember(self, key):
        self.ring[self.place : self.place + len(key)] = key
        self.place = (self.place + len(key)) % len(self.ring)


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=280)
    args = cli.parse_args()
    torch.manual_seed(53)
    images = torch.rand(512, 3, 48, 48)
    contrast = MomentumContrast()
    sgd = torch.optim.SGD(contrast.fast, lr=0.03, momentum=0.9, weight_decay=1e-4, foreach=True)
    for step in range(args.steps):  # the training loop
        begin = step * 64 % len(images)
        loss, key = contrast.loss(images[begin : begin + 64])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        contrast.remember(key)
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
