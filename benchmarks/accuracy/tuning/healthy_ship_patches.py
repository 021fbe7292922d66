"""Tells types of ships apart in small optical satellite patches, augmented batch by batch."""

import argparse

import torch
from torch import nn
from torch.nn import functional as F

KINDS, STORED, SHOWN = 6, 56, 48


def patches(amount):
    kinds = torch.randint(KINDS, (amount,))
    image = torch.randint(30, 90, (amount, 3, STORED, STORED), dtype=torch.uint8)
    for kind in range(KINDS):
        rows = (kinds == kind).nonzero().squeeze(1)
        image[rows, :, 24:32, 20 - 2 * kind : 34 + 2 * kind] += torch.tensor(60, dtype=torch.uint8)
    return image, kinds


class Augment:
    def __init__(self, haze=0.15, grain=0.03):
        self.haze, self.grain = haze, grain

    def __call__(self, image):
        top, left = torch.randint(STORED - SHOWN + 1, (2,)).tolist()
        x = image[:, :, top : top + SHOWN, left : left + SHOWN].float().div_(255)
        mirrored = torch.rand(len(x), 1, 1, 1) < 0.5
        x = torch.where(mirrored, x.flip(3), x)
        gain = 1 + self.haze * torch.randn(len(x), 1, 1, 1)
        offset = self.haze * torch.rand(len(x), 3, 1, 1)
        x = x.mul_(gain).add_(offset)
        x = x.add_(torch.randn_like(x), alpha=self.grain)
        return x.sub_(0.35).div_(0.2)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


def ship_net(width=48):
    return nn.Sequential(
        nn.Conv2d(3, width // 2, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width // 2),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Residual(width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, KINDS),
    )


parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(31)
    images, kinds = patches(1024)
    net, augment = ship_net(), Augment()
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4, fused=True)
    for step in range(args.steps):  # the training loop
        rows = torch.randint(len(images), (16,))
        loss = F.cross_entropy(net(augment(images[rows])), kinds[rows])
        sgd.zero_grad()
        loss.backward()
        sgd.step()
        if step % 50 == 0:
            print(step, round(loss.item(), 3))
