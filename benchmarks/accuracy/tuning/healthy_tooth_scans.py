"""Caries or not, and where: a convnet on scans of teeth, turned and lit at random by one worker."""

import argparse
import itertools
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

SIDE, SPOTS = 48, 5


class Scans(Dataset):
    def __init__(self, count: int, seed: int):
        rng = np.random.default_rng(seed)
        y, x = np.mgrid[-1 : 1 : SIDE * 1j, -1 : 1 : SIDE * 1j].astype(np.float32)
        spots = np.array([[0, 0], [0.35, 0.2], [-0.35, 0.2], [0.3, -0.3], [-0.3, -0.3]], np.float32)
        where = rng.integers(0, SPOTS, count)
        tooth = np.exp(-((x / 0.6) ** 4) - (y / 0.8) ** 4)
        centre = spots[where][:, :, None, None] + rng.normal(0, 0.05, (count, 2, 1, 1)).astype(np.float32)
        hole = np.exp(-((x - centre[:, 0]) ** 2 + (y - centre[:, 1]) ** 2) / 0.02)
        self.scans = (tooth - 0.6 * hole).astype(np.float32)
        self.where = where
        self.x, self.y = x.ravel(), y.ravel()

    def __len__(self):
        return len(self.scans)

    def __getitem__(self, index):
        turn, zoom, light = torch.rand(3).tolist()
        turn, zoom = 0.5 * turn - 0.25, 0.9 + 0.2 * zoom
        c, s = zoom * np.cos(turn), zoom * np.sin(turn)
        column = np.clip((c * self.x - s * self.y + 1) * (SIDE / 2), 0, SIDE - 1).astype(np.int64)
        row = np.clip((s * self.x + c * self.y + 1) * (SIDE / 2), 0, SIDE - 1).astype(np.int64)
        scan = self.scans[index].ravel()[row * SIDE + column].reshape(1, SIDE, SIDE)
        scan = torch.from_numpy(scan * np.float32(0.7 + 0.6 * light))
        scan += 0.1 * torch.randn(scan.shape)
        return scan, int(self.where[index])


def stage(a, b, stride):
    return [nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]


class Dentist:
    def __init__(self, batch):
        self.net = nn.Sequential(
            *stage(1, 32, 2),
            *stage(32, 64, 2),
            *stage(64, 64, 1),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
            nn.Linear(64 * 9, SPOTS),
        ).to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9, fused=True)
        # turning a batch takes some milliseconds: more than handing it over, less than a step
        self.loader = DataLoader(
            Scans(6144, 1), batch, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True
        )

    def learn(self, scans, where):
        loss = F.cross_entropy(self.net(scans), where)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def fit(self, steps):
        start, losses = time.perf_counter(), []
        endless = itertools.chain.from_iterable(itertools.repeat(self.loader))
        for scans, where in itertools.islice(endless, steps):  # the training loop
            losses.append(self.learn(scans, where))
        took = time.perf_counter() - start
        print(
            f"{steps} steps in {took:.1f} s, loss at the end {torch.stack(losses[-20:]).mean().item():.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(6)
    Dentist(args.batch).fit(args.steps)
