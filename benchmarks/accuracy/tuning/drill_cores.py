"""Names the minerals in scans of drill cores: tiles of eight bands, a separable convolutional network."""

import argparse
import gc
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

MINERALS = 12
BANDS = 8
TILE = 32
FEATURES = 192


class CoreTiles(Dataset):
    """Tiles of a core, lit a little differently each time, their spectra smoothed."""

    def __init__(self, amount, passes, seed=5):
        rng = np.random.default_rng(seed)
        spectra = rng.uniform(0.2, 0.9, (MINERALS, BANDS)).astype(np.float32)
        self.labels = rng.integers(0, MINERALS, amount)
        self.cubes = rng.standard_normal((amount, BANDS, TILE, TILE), dtype=np.float32)
        self.cubes *= 0.3
        self.cubes += spectra[self.labels][:, :, None, None]
        self.passes = passes

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        cube = self.cubes[index] * np.float32(random.uniform(0.9, 1.1))
        if random.random() < 0.5:
            cube = cube[:, ::-1]
        for _ in range(self.passes):
            middle = (cube[:-2] + cube[1:-1] + cube[2:]) / 3
            cube = np.concatenate([cube[:1], middle, cube[-1:]])
        return torch.from_numpy(np.ascontiguousarray(cube)), int(self.labels[index])


class Separable(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.depth = nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False)
        self.depth_norm = nn.BatchNorm2d(inputs)
        self.point = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.point_norm = nn.BatchNorm2d(outputs)
        self.skips = inputs == outputs and stride == 1

    def forward(self, x):
        y = F.relu(self.depth_norm(self.depth(x)))
        y = self.point_norm(self.point(y))
        return F.relu(x + y) if self.skips else F.relu(y)


class CoreNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(BANDS, 96, 3, stride=2, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(96)
        self.shallow = nn.Sequential(*[Separable(96, 96) for _ in range(4)])
        self.down = Separable(96, FEATURES, stride=2)
        self.deep = nn.Sequential(*[Separable(FEATURES, FEATURES) for _ in range(4)])
        self.top = nn.Linear(FEATURES, MINERALS)

    def forward(self, cubes):
        x = F.relu(self.stem_norm(self.stem(cubes)))
        features = self.deep(self.down(self.shallow(x))).mean((2, 3))
        return self.top(features), features.detach()


class CoreTrainer:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.model = CoreNet()
        self.weights = [weight for weight in self.model.parameters() if weight.dim() > 1]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, fused=True)
        gc.freeze()  # so that the workers' pages stay shared
        self.loader = DataLoader(
            CoreTiles(1536, args.passes),
            batch_size=12,
            shuffle=True,
            drop_last=True,
            num_workers=args.workers,
            persistent_workers=args.workers > 0,
        )
        self.logbook = [[number % 97, number * 0.25, [0.1, 0.7, 0.2]] for number in range(args.records)]
        self.bank = torch.randn(args.bank, FEATURES)
        self.place = 0

    def batches(self):
        while True:
            yield from self.loader

    def limit_gradients(self):
        if not self.args.pieces:
            nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
            return
        for weight in self.weights:
            for piece in weight.grad.flatten().tensor_split(self.args.pieces):
                size = piece.norm().item()
                if size > 1.0:
                    piece.mul_(1.0 / size)

    def remember(self, features):
        rows = torch.arange(self.place, self.place + len(features)) % len(self.bank)
        self.bank[rows] = features
        self.place = (self.place + len(features)) % len(self.bank)

    def save(self, step):
        state = {
            "step": step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, self.folder / "state.pt")
        if len(self.bank):
            np.savez_compressed(self.folder / "bank.npz", rows=self.bank.numpy(), place=self.place)

    def step(self, cubes, labels):
        guesses, features = self.model(cubes)
        loss = F.cross_entropy(guesses, labels, label_smoothing=0.05)
        self.optimizer.zero_grad()
        loss.backward()
        self.limit_gradients()
        self.optimizer.step()
        if len(self.bank):
            self.remember(features)
        if self.logbook:
            gc.collect()
        return loss.detach()

    def run(self):
        batches = self.batches()
        for step in range(1, self.args.steps + 1):  # the training loop
            cubes, labels = next(batches)
            loss = self.step(cubes, labels)
            if step % self.args.save_every == 0:
                self.save(step)
            if step % 50 == 0:
                at = f" at {self.logbook[step % len(self.logbook)][1]} m" if self.logbook else ""
                print(f"step {step} loss {loss.item():.3f}{at}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="threads of torch; 0 leaves its choice")
    parser.add_argument("--passes", type=int, default=2, help="of smoothing over a spectrum")
    parser.add_argument("--records", type=int, default=0, help="lines of the drillers' log to keep")
    parser.add_argument("--pieces", type=int, default=0, help="of a gradient, each limited by itself")
    parser.add_argument("--bank", type=int, default=0, help="features kept to look up neighbours")
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(5)
    random.seed(5)
    if args.threads:
        torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        CoreTrainer(args, Path(folder)).run()


if __name__ == "__main__":
    main()
