"""Course project: which points of a lidar sweep over a parking lot belong to cars?

A PointNet-like network; each sweep is a set of points, of x, y, z and intensity.
"""

import argparse
import os
import sys
import tempfile
import zlib

if "--cluster" in sys.argv:
    # the cluster's guide: one thread a job, jobs share nodes
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, IterableDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--cluster", action="store_true", help="settings for the shared cluster")
parser.add_argument("--heights", type=int, default=0, help="occupancy maps, one for each slice of height")
parser.add_argument(
    "--archive", type=int, default=0, help="read the sweeps, of so many returns each, from the archive"
)
parser.add_argument(
    "--context", type=int, default=0, help="features of the map that each point gets besides"
)
parser.add_argument("--saliency", action="store_true", help="tell in the end which inputs matter")
args = parser.parse_args()

torch.manual_seed(3)
# a large block, freed at once: malloc then keeps what the steps free, and does not give it back
torch.empty(30 << 20, dtype=torch.uint8)
rng = np.random.default_rng(3)

SWEEPS, POINTS, BATCH = 240, 320, 12
MAP = 3300  # cells a side, of 5 cm


def make_sweep():
    cars = rng.uniform(-60, 60, (8, 2))
    owner = rng.integers(0, 8, POINTS)
    is_car = rng.random(POINTS) < 0.4
    xy = np.where(
        is_car[:, None], cars[owner] + rng.normal(0, 1, (POINTS, 2)), rng.uniform(-80, 80, (POINTS, 2))
    )
    z = np.where(is_car, rng.uniform(0.2, 1.6, POINTS), rng.normal(0, 0.05, POINTS))
    strength = np.clip(rng.normal(0.4 + 0.2 * is_car, 0.2), 0, 1)
    return np.column_stack([xy / 80, z, strength]).astype(np.float32), is_car.astype(np.float32)


sweeps = [make_sweep() for _ in range(SWEEPS)]
clouds = torch.from_numpy(np.stack([s[0] for s in sweeps]))
labels = torch.from_numpy(np.stack([s[1] for s in sweeps]))
surroundings = torch.randn(SWEEPS, 1, args.context)  # what the map says about a sweep's place


class Archive(IterableDataset):
    """Sweeps from the recorder's files: all returns of a sweep, packed; the strongest are kept."""

    def __init__(self, folder, returns):
        self.folder, self.returns = folder, returns
        for i in range(SWEEPS):
            echoes = np.tile(clouds[i].numpy(), (returns, 1))
            with open(f"{folder}/{i:04d}.bin", "wb") as f:
                f.write(zlib.compress(echoes.tobytes(), 1))

    def __iter__(self):
        while True:
            for i in torch.randperm(SWEEPS).tolist():
                with open(f"{self.folder}/{i:04d}.bin", "rb") as f:
                    echoes = np.frombuffer(zlib.decompress(f.read()), np.float32).reshape(
                        self.returns, POINTS, 4
                    )
                # the returns of one pulse differ by noise: take the median
                noisy = echoes + np.random.normal(0, 0.002, echoes.shape).astype(np.float32)
                yield np.median(noisy, axis=0), labels[i].numpy(), i


def from_memory():
    while True:
        order = torch.randperm(SWEEPS)
        for k in range(0, SWEEPS, BATCH):
            chosen = order[k : k + BATCH]
            yield clouds[chosen], labels[chosen], chosen


class PointNet(nn.Module):
    def __init__(self, context, width=96):
        super().__init__()
        self.local = nn.Sequential(
            nn.Linear(4 + context, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        self.deep = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 2 * width))
        self.head = nn.Sequential(
            nn.Linear(3 * width, 2 * width),
            nn.ReLU(),
            nn.Linear(2 * width, width),
            nn.ReLU(),
            nn.Linear(width, 1),
        )

    def forward(self, points):
        near = self.local(points)
        whole = self.deep(near).amax(1, keepdim=True).expand(-1, points.shape[1], -1)
        return self.head(torch.cat([near, whole], -1)).squeeze(-1)


def crowding(points, slices):
    """How crowded the cells of the points are, in each slice of height: crowded cells count less."""
    flat = points.detach().reshape(-1, points.shape[-1])
    cells = ((flat[:, 0] + 1.3) / 2.6 * MAP).long().clamp(0, MAP - 1) * MAP
    cells += ((flat[:, 1] + 1.3) / 2.6 * MAP).long().clamp(0, MAP - 1)
    crowd = torch.zeros(len(flat))
    for k in range(slices):
        low, high = 1.8 * k / slices, 1.8 * (k + 1) / slices
        inside = (flat[:, 2] >= low) & (flat[:, 2] < high)
        occupancy = torch.zeros(MAP * MAP)
        occupancy.index_add_(0, cells[inside], torch.ones(int(inside.sum())))
        crowd[inside] = occupancy[cells[inside]]
    return crowd.view(points.shape[:2])


def main():
    with tempfile.TemporaryDirectory() as folder:
        if args.archive:
            batches = iter(DataLoader(Archive(folder, args.archive), batch_size=BATCH))
        else:
            batches = from_memory()
        model = PointNet(args.context)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)

        for step in range(args.steps):  # the training loop
            points, target, place = next(batches)
            if args.context:
                points = torch.cat([points, surroundings[place].expand(-1, POINTS, -1)], -1)
            if args.saliency:
                points.requires_grad_()
            logits = model(points)
            weight = None
            if args.heights:
                weight = 1 / (1 + crowding(points, args.heights))
            loss = F.binary_cross_entropy_with_logits(logits, target, weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print("step", step, "loss", round(loss.item(), 4), flush=True)

        if args.saliency:
            matters = points.grad.abs().mean((0, 1))
            print("most telling inputs:", matters.topk(3).indices.tolist())


if __name__ == "__main__":
    main()
