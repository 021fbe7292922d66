"""From which kiln is a sherd? A PointNet over scanned surfaces, with the accuracy's uncertainty on the display."""

import argparse
from collections import deque

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

POINTS, KILNS = 256, 9


class Sherds(Dataset):
    """Curved patches; each kiln has its own curvature and wall."""

    def __init__(self, length):
        self.length = length
        rng = np.random.default_rng(6)
        flat = rng.uniform(-1, 1, (400, POINTS, 2)).astype(np.float32)
        self.kiln = np.arange(400) % KILNS
        bend = (0.2 + 0.1 * self.kiln)[:, None].astype(np.float32)
        height = bend * (flat**2).sum(2) + 0.02 * rng.standard_normal((400, POINTS), dtype=np.float32)
        self.cloud = np.concatenate([flat, height[:, :, None]], 2)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        which = index * 7919 % 400
        return self.cloud[which], self.kiln[which]


class Bench:
    """Lays sherds side by side. The scanner's ripple is smoothed away along the scan, some times over."""

    def __init__(self, smoothing):
        self.smoothing = smoothing

    def __call__(self, sherds):
        clouds = np.stack([cloud for cloud, _ in sherds])
        for _ in range(self.smoothing):
            before, after = np.roll(clouds, 1, axis=1), np.roll(clouds, -1, axis=1)
            clouds = 0.98 * clouds + 0.01 * (before + after)
        clouds -= clouds.mean(1, keepdims=True)
        return torch.from_numpy(clouds), torch.tensor([int(kiln) for _, kiln in sherds])


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = (3, 32, 64, 128)
        self.local = nn.Sequential()
        for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
            self.local.add_module(f"lin{i}", nn.Linear(a, b))
            self.local.add_module(f"act{i}", nn.ReLU())
        self.whole = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, KILNS))

    def forward(self, clouds):
        return self.whole(self.local(clouds).amax(dim=1))


class Uncertainty:
    """Accuracy over the last sherds, and between what bounds it lies."""

    def __init__(self, draws, span=2000):
        self.draws, self.hits = draws, deque(maxlen=span)
        self.rng = np.random.default_rng(0)
        self.low = self.high = float("nan")

    def add(self, scores, kilns):
        self.hits.extend((scores.argmax(1) == kilns).tolist())
        hits = np.array(self.hits, dtype=np.float32)
        means = [hits[self.rng.integers(0, len(hits), 500)].mean() for _ in range(self.draws)]
        self.low, self.high = np.quantile(means, [0.05, 0.95])


def training(model, loader, optimizer):
    loss_of = nn.CrossEntropyLoss()
    for clouds, kilns in loader:  # the training loop
        scores = model(clouds)
        loss = loss_of(scores, kilns)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach(), scores.detach(), kilns


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--smoothing", type=int, default=0, help="how often a scan's ripple is smoothed")
    parser.add_argument("--draws", type=int, default=0, help="draws for the bounds of the accuracy")
    args = parser.parse_args()

    torch.manual_seed(14)
    torch.set_num_threads(1)
    loader = DataLoader(
        Sherds(args.steps * args.batch),
        batch_size=args.batch,
        num_workers=2,
        collate_fn=Bench(args.smoothing),
        multiprocessing_context="fork",
    )
    model = PointNet()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, fused=True)
    bounds = Uncertainty(args.draws) if args.draws else None
    for count, (loss, scores, kilns) in enumerate(training(model, loader, optimizer), 1):
        if bounds:
            bounds.add(scores, kilns)
        if count % 50 == 0:
            tail = f", accuracy {bounds.low:.2f} to {bounds.high:.2f}" if bounds else ""
            print(f"batch {count}: loss {loss.item():.3f}{tail}")


if __name__ == "__main__":
    main()
