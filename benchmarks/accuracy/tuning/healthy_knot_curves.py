"""Names the knot that a noisy curve in space is tied into, from points on it; a PointNet.

Each curve is drawn anew when it is asked for, by a worker.
"""

import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

KNOTS = [(2, 3), (3, 2), (2, 5), (3, 4), (2, 7), (1, 1)]
POINTS = 96


class Curves(Dataset):
    def __init__(self, count):
        self.count = count
        self.fine = np.linspace(0, 2 * np.pi, 512)

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        rng = np.random.default_rng(number)
        kind = int(rng.integers(len(KNOTS)))
        p, q = KNOTS[kind]
        radius = 2 + np.cos(q * self.fine)
        curve = np.stack(
            [radius * np.cos(p * self.fine), radius * np.sin(p * self.fine), np.sin(q * self.fine)]
        )
        turn, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        curve = turn @ curve
        # points at equal distances along it
        along = np.sqrt(np.square(np.diff(curve, axis=1)).sum(0)).cumsum()
        at = np.linspace(0, along[-1], POINTS, endpoint=False)
        points = np.stack([np.interp(at, along, axis[1:]) for axis in curve], 1)
        points += 0.05 * rng.standard_normal(points.shape)
        return torch.from_numpy(points.astype(np.float32)), kind


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(
            nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 128), nn.ReLU()
        )
        self.whole = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, len(KNOTS)))

    def forward(self, points):
        return self.whole(self.local(points).amax(1))


def steps_of(loader, model, optimizer):
    criterion = nn.CrossEntropyLoss()
    for points, kind in loader:  # the training loop
        loss = criterion(model(points), kind)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.detach()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--curves", type=int, default=48)
    args = parser.parse_args()
    torch.manual_seed(12)
    loader = DataLoader(
        Curves(args.steps * args.curves), args.curves, num_workers=1, multiprocessing_context="fork"
    )
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    total = torch.zeros(())
    for loss in steps_of(loader, model, optimizer):
        total += loss
    print(f"mean loss {total.item() / args.steps:.3f}")


if __name__ == "__main__":
    main()
