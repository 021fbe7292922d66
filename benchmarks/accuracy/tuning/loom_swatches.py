"""Finds the kind of weave and the places of broken threads in photographs of cloth, taken at the loom."""

import argparse
import os
import tempfile
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

SIDE, CELLS = 64, 16
PER_CELL = SIDE // CELLS
WEAVES = ("plain", "twill", "satin", "basket")
SWATCHES = 400
ARCHIVE = 100  # one in so many swatches has been scanned from the sample books of the old mill
SCAN = 4 * SIDE


@dataclass
class Config:
    steps: int
    folder: str
    exposures: int = 0
    clicks: int = 0
    rounds: int = 0
    bands: int = 0
    batch: int = 32
    workers: int = 1
    width: int = 32
    rate: float = 1e-3


def weave(kind, rng):
    """Returns a swatch as bytes, and in which of its cells a thread is broken."""
    warp, weft = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    shift, scale = rng.integers(0, 8), rng.integers(2, 4)
    warp, weft = (warp + shift) // scale, weft // scale
    over = {
        "plain": (warp + weft) % 2,
        "twill": (warp + weft) % 4 < 2,
        "satin": (warp * 2 + weft) % 5 < 1,
        "basket": (warp // 2 + weft // 2) % 2,
    }[WEAVES[kind]]
    cloth = 90 + 80 * over.astype(np.float32) + rng.normal(0, 12, (SIDE, SIDE))
    broken = np.zeros((CELLS, CELLS), dtype=np.float32)
    for row, column in rng.integers(0, CELLS, (rng.integers(0, 5), 2)):
        cloth[row * PER_CELL : (row + 1) * PER_CELL, column * PER_CELL : (column + 1) * PER_CELL] = 230
        broken[row, column] = 1
    return cloth.clip(0, 255).astype(np.uint8), broken


def even_out(scan, rounds):
    """Takes the grain of the paper out of a scan, but keeps its edges (total variation, by descent)."""
    scan = scan.astype(np.float32) / 255
    smooth = scan.copy()
    for _ in range(rounds):
        right = np.diff(smooth, axis=1, append=smooth[:, -1:])
        down = np.diff(smooth, axis=0, append=smooth[-1:])
        size = np.sqrt(right * right + down * down + 0.01)
        right /= size
        down /= size
        spread = right - np.roll(right, 1, axis=1) + down - np.roll(down, 1, axis=0)
        smooth += 0.01 * (spread - 4 * (smooth - scan))
    return smooth.reshape(SIDE, SCAN // SIDE, SIDE, SCAN // SIDE).mean((1, 3)).clip(0, 1)


class Swatches(Dataset):
    def __init__(self, config, seed):
        rng = np.random.default_rng(seed)
        self.exposures, self.rounds, self.bands = config.exposures, config.rounds, config.bands
        self.folder = config.folder
        self.kinds = rng.integers(0, len(WEAVES), SWATCHES)
        made = [weave(kind, rng) for kind in self.kinds]
        self.cloths = np.stack([cloth for cloth, _ in made])
        self.broken = np.stack([broken for _, broken in made])
        self.clicks = rng.integers(0, SIDE, (SWATCHES, config.clicks, 2))
        slope = np.linspace(0.85, 1.15, SIDE, dtype=np.float32)
        flat = np.ones(SIDE, dtype=np.float32)
        self.lamps = [np.outer(slope, flat), np.outer(flat, slope), np.outer(slope[::-1], flat)]
        self.scans = {}
        for index in range(ARCHIVE // 2, SWATCHES, ARCHIVE):
            large = self.cloths[index].repeat(SCAN // SIDE, 0).repeat(SCAN // SIDE, 1)
            self.scans[index] = (large + rng.normal(0, 9, large.shape)).clip(0, 255).astype(np.uint8)
        if self.bands:
            self._store()
        self.rng = None

    def _path(self, index, band):
        return os.path.join(self.folder, f"swatch{index:04d}_band{band:03d}.npy")

    def _store(self):
        """Keeps the swatches as the camera does, which takes a band of the running cloth at a time."""
        for index, cloth in enumerate(self.cloths):
            for band, rows in enumerate(np.array_split(cloth, self.bands)):
                np.save(self._path(index, band), rows)

    def _photograph(self, index):
        if self.rounds and index in self.scans:
            return even_out(self.scans[index], self.rounds)
        if self.bands:
            cloth = np.concatenate([np.load(self._path(index, band)) for band in range(self.bands)])
        else:
            cloth = self.cloths[index]
        return cloth.astype(np.float32) / 255

    def __len__(self):
        return SWATCHES

    def __getitem__(self, index):
        if self.rng is None:
            self.rng = np.random.default_rng(torch.initial_seed())
        rng = self.rng
        image, broken, clicks = self._photograph(index), self.broken[index], self.clicks[index]
        if self.exposures:
            total = np.zeros((SIDE, SIDE), dtype=np.float32)
            for _ in range(self.exposures):
                view = np.roll(image, rng.integers(-1, 2, 2), axis=(0, 1))
                view = (view + np.roll(view, 1, axis=0) + np.roll(view, 1, axis=1)) / 3
                view = (view * self.lamps[rng.integers(len(self.lamps))]) ** rng.uniform(0.8, 1.2)
                total += view + 0.03 * rng.standard_normal((SIDE, SIDE), dtype=np.float32)
            image = total / self.exposures
        if rng.random() < 0.5:
            image, broken = image[:, ::-1], broken[:, ::-1]
            clicks = np.stack([clicks[:, 0], SIDE - 1 - clicks[:, 1]], axis=1)
        return image * np.float32(rng.uniform(0.9, 1.1)), self.kinds[index], broken, clicks


def collate(samples):
    images, kinds, broken, clicks = zip(*samples, strict=False)
    attention = torch.zeros(len(samples), CELLS, CELLS)
    for number, points in enumerate(clicks):
        for row, column in points:
            attention[number, row // PER_CELL, column // PER_CELL] += 1
    return {
        "images": torch.from_numpy(np.stack(images)).unsqueeze(1),
        "kinds": torch.from_numpy(np.stack(kinds)),
        "broken": torch.from_numpy(np.stack(broken)),
        "attention": attention,
    }


class Inspector(nn.Module):
    """Says what weave it is, which threads are broken, and where a person would look."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width // 2, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width // 2),
            nn.ReLU(inplace=True),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.maps = nn.Conv2d(width, 2, 1)
        self.kind = nn.Linear(width, len(WEAVES))

    def forward(self, images):
        x = self.stem(images)
        x = F.relu(x + self.body(x))
        maps = self.maps(x)
        return self.kind(x.mean((2, 3))), maps[:, 0], maps[:, 1]


class Trainer:
    def __init__(self, config):
        self.config = config
        torch.set_num_threads(1)
        self.swatches = Swatches(config, seed=17)
        self.model = Inspector(config.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.rate, fused=True)

    def loader(self):
        sampler = RandomSampler(
            self.swatches, replacement=True, num_samples=self.config.steps * self.config.batch
        )
        return DataLoader(
            self.swatches,
            batch_size=self.config.batch,
            sampler=sampler,
            num_workers=self.config.workers,
            collate_fn=collate,
            prefetch_factor=4,
            drop_last=True,
        )

    def loss(self, batch):
        kind, broken, attention = self.model(batch["images"])
        return (
            F.cross_entropy(kind, batch["kinds"])
            + F.binary_cross_entropy_with_logits(broken, batch["broken"])
            + 0.1 * F.mse_loss(attention, batch["attention"].log1p())
        )

    def fit(self):
        self.model.train()
        for step, batch in enumerate(self.loader()):  # the training loop
            loss = self.loss(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if step % 50 == 49:
                print(f"step {step + 1}: loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--exposures", type=int, default=0, help="photographs that are averaged")
    parser.add_argument("--clicks", type=int, default=0, help="points that the inspectors looked at, each")
    parser.add_argument("--rounds", type=int, default=0, help="of evening out a scan from the archive")
    parser.add_argument("--bands", type=int, default=0, help="bands that the camera keeps a swatch in")
    args = parser.parse_args()
    torch.manual_seed(17)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(Config(folder=folder, **vars(args))).fit()


if __name__ == "__main__":
    main()
