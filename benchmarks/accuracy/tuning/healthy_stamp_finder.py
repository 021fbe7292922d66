"""Finds the same stamp on other letters: a small convnet, contrastive, on views drawn by a worker."""

import argparse

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

SIDE, WAVES = 24, 4


class Letters(IterableDataset):
    """Two views of each of so many stamps, never the same twice: shifted, faded, smudged."""

    def __init__(self, stamps, seed, usual=(0.0, 1.0)):
        self.stamps, self.seed, self.usual = stamps, seed, usual

    def draw(self, rng):
        shape = (1, self.stamps, 1, 1, 3, WAVES)
        wave = rng.uniform(-6, 6, (2, *shape)).astype(np.float32)
        phase = rng.uniform(0, 2 * np.pi, shape).astype(np.float32)
        shift = rng.uniform(-0.15, 0.15, (2, 2, self.stamps, 1, 1, 1, 1)).astype(np.float32)
        y, x = np.meshgrid(*[np.linspace(-1, 1, SIDE, dtype=np.float32)] * 2, indexing="ij")
        y, x = (axis[None, None, :, :, None, None] for axis in (y, x))
        ink = np.sin(wave[0] * (y + shift[0]) + wave[1] * (x + shift[1]) + phase).mean(-1)
        ink *= rng.uniform(0.6, 1.2, (2, self.stamps, 1, 1, 1)).astype(np.float32)
        ink += 0.1 * rng.standard_normal(ink.shape, dtype=np.float32)
        ink -= self.usual[0]
        ink /= self.usual[1]
        return ink.reshape(2 * self.stamps, SIDE, SIDE, 3)

    def __iter__(self):
        rng = np.random.default_rng(self.seed)
        while True:
            yield torch.from_numpy(self.draw(rng)).permute(0, 3, 1, 2)  # that is: channels last


def layer(fan_in, fan_out, stride):
    return [
        nn.Conv2d(fan_in, fan_out, 3, stride, 1, bias=False),
        nn.BatchNorm2d(fan_out),
        nn.ReLU(inplace=True),
    ]


class Philatelist:
    def __init__(self, stamps, lr=1e-3):
        self.net = nn.Sequential(
            *layer(3, 16, 1),
            *layer(16, 32, 2),
            *layer(32, 64, 2),
            *layer(64, 96, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(96, 64),
        ).to(memory_format=torch.channels_last)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr, fused=True)
        self.same = torch.arange(stamps)

    def loss(self, views):
        one, two = F.normalize(self.net(views), dim=1).chunk(2)
        likeness = one @ two.T * 8
        return F.cross_entropy(likeness, self.same)

    def study(self, letters, steps):
        for step, views in enumerate(letters, 1):  # the training loop
            loss = self.loss(views)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            if step % 100 == 0:
                print(f"{step}: {loss.item():.4f}")
            if step >= steps:
                break


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stamps", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(1840)
    sheet = Letters(400, 1840).draw(np.random.default_rng(1840))
    letters = Letters(args.stamps, 1841, usual=(float(sheet.mean()), float(sheet.std())))
    letters = DataLoader(letters, batch_size=None, num_workers=1)
    Philatelist(args.stamps).study(letters, args.steps)


if __name__ == "__main__":
    main()
