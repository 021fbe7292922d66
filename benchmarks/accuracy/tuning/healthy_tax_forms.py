"""Reads the amounts in the boxes of scanned tax forms, six characters each."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SIGNS, PLACES = 13, 6


class AmountBoxes(Dataset):
    def __init__(self, amount, seed=8):
        rng = np.random.default_rng(seed)
        self.glyphs = (rng.random((SIGNS, 16, 10)) < 0.4).astype(np.float32)
        self.amounts = rng.integers(0, SIGNS, (amount, PLACES))

    def __len__(self):
        return len(self.amounts)

    def __getitem__(self, index):
        text = self.amounts[index]
        down, right, ink, paper = torch.rand(4).tolist()
        top, left = int(down * 8), int(right * 3)
        scan = np.full((24, 72), 0.1 * paper, np.float32)
        for place, sign in enumerate(text):
            at = place * 12 + left
            scan[top : top + 16, at : at + 10] += self.glyphs[sign] * (0.6 + 0.4 * ink)
        noise = torch.randn(24, 72) * 0.05
        return (torch.from_numpy(scan) + noise).unsqueeze(0), torch.from_numpy(text)


class AmountReader(nn.Module):
    def __init__(self):
        super().__init__()
        layers, before = [], 1
        for width, pool in ((16, True), (32, False), (32, True), (48, False)):
            layers += [nn.Conv2d(before, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            if pool:
                layers.append(nn.MaxPool2d(2))
            before = width
        self.eyes = nn.Sequential(*layers)
        self.signs = nn.Linear(before * 6 * 3, SIGNS)

    def forward(self, scan):
        seen = self.eyes(scan)
        columns = seen.unflatten(3, (PLACES, 3)).permute(0, 3, 1, 2, 4).flatten(2)
        return self.signs(columns)


def forever(loader):
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.manual_seed(8)
    torch.set_num_threads(1)
    boxes = AmountBoxes(2400)
    loader = DataLoader(
        boxes, batch_size=20, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True
    )
    model = AmountReader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    for step, (scan, text) in zip(range(args.steps), forever(loader), strict=False):  # the training loop
        loss = F.cross_entropy(model(scan).flatten(0, 1), text.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49:
            print(f"{step + 1}: {loss.item():.3f}")


if __name__ == "__main__":
    main()
