"""Segments stained nuclei: a small U-Net on tiles that lie in memory as bytes."""

import argparse
import gzip
import math
import random
import sqlite3
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

CFG = {
    "seed": 5,
    "tiles": {"count": 1536, "side": 64, "classes": 4},
    "model": {"widths": (16, 24, 40)},
    "train": {"batch": 8, "lr": 2e-3, "weight_decay": 1e-4, "smooth": 1.0},
    "save_every": 20,
}


# ---------------------------------------------------------------- data


def draw_tiles(count, side, classes):
    """Blobs of up to three kinds on a pink background; returns images and masks, both uint8."""
    grid = torch.arange(side).float()
    masks = torch.zeros(count, side, side, dtype=torch.uint8)
    for kind in range(1, classes):
        center, radius = torch.rand(2, count, 1, 1) * side, 6 + 6 * torch.rand(count, 1, 1)
        inside = (grid[:, None] - center[0]) ** 2 + (grid - center[1]) ** 2 < radius**2
        masks[inside] = kind
    stains = torch.tensor([[230, 200, 220], [90, 60, 150], [150, 70, 120], [60, 90, 170]])
    images = stains[masks.long()].permute(0, 3, 1, 2) + torch.randint(-25, 26, (count, 3, side, side))
    return images.clamp(0, 255).byte(), masks


class Tiles(Dataset):
    """A batch at a time: an index is the list of a batch's rows."""

    def __init__(self, images, masks, round_trip=0.0):
        self.images, self.masks = images, masks
        self.round_trip = round_trip / 1000

    def __len__(self):
        return len(self.images)

    def read(self, row):
        time.sleep(self.round_trip)  # the slides stay in the hospital's object store
        return self.images[row], self.masks[row]

    def __getitem__(self, rows):
        if self.round_trip:
            pictures, masks = zip(*map(self.read, rows), strict=True)
            return torch.stack(pictures), torch.stack(masks)
        return self.images[rows], self.masks[rows]


def endless(loader):
    while True:
        yield from loader


def make_loader(args, images, masks):
    tiles = Tiles(images, masks, args.round_trip)
    rows = BatchSampler(RandomSampler(tiles), CFG["train"]["batch"], drop_last=True)
    return DataLoader(tiles, sampler=rows, batch_size=None)


# ---------------------------------------------------------------- model


def conv(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(inplace=True)
    )


class UNet(nn.Module):
    def __init__(self, widths, classes):
        super().__init__()
        first, middle, last = widths
        self.stem = nn.Sequential(conv(3, first), conv(first, first))
        self.down1 = nn.Sequential(conv(first, middle, 2), conv(middle, middle))
        self.down2 = nn.Sequential(conv(middle, last, 2), conv(last, last), conv(last, last))
        self.up1 = conv(last + middle, middle)
        self.up2 = conv(middle + first, first)
        self.head = nn.Conv2d(first, classes, 1)

    def forward(self, x):
        a = self.stem(x)
        b = self.down1(a)
        c = self.down2(b)
        b = self.up1(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.head(self.up2(torch.cat([F.interpolate(b, scale_factor=2), a], 1)))


# ---------------------------------------------------------------- balance of the classes, loss


def census(masks, classes):
    return torch.bincount(masks.flatten().int(), minlength=classes)


def archive_records(count, side, classes):
    """What the archive's index says of its tiles: pixels of each class."""
    area = side * side // classes
    return [{kind: random.randrange(area) for kind in range(classes)} for _ in range(count)]


class Balance:
    def __init__(self, masks, classes, records):
        self.classes, self.records = classes, records
        self.of_tiles = self.inverse(census(masks, classes).tolist())

    @staticmethod
    def inverse(pixels):
        weights = torch.tensor([1 / math.sqrt(n + 1) for n in pixels])
        return weights / weights.mean()

    @property
    def weights(self):
        if not self.records:
            return self.of_tiles
        pixels = sum(map(Counter, self.records), Counter())
        return self.inverse([pixels[kind] for kind in range(self.classes)])


def segmentation_loss(logits, masks, weights, smooth):
    entropy = F.cross_entropy(logits, masks, weights)
    chances = logits.softmax(1)
    hit = chances.gather(1, masks[:, None]).mean()
    return entropy + 1 - (2 * hit + smooth) / (chances.square().sum(1).mean() + 1 + smooth), chances


# ---------------------------------------------------------------- what is kept of a run


class RecallCurve:
    """Hits, false alarms and misses at evenly spaced thresholds, over the whole run."""

    def __init__(self, points):
        self.thresholds = [(point + 0.5) / points for point in range(points)]
        self.counts = torch.zeros(points, 3)

    def update(self, chances, masks):
        nucleus, truth = 1 - chances.detach()[:, 0], masks > 0
        for row, threshold in zip(self.counts, self.thresholds, strict=True):
            found = nucleus > threshold
            row[0] += (found & truth).sum()
            row[1] += (found & ~truth).sum()
            row[2] += (~found & truth).sum()


def power_profile(exponent):
    """Averages whose memory grows with the run (Karras et al., 2024): weight k counts as k ** exponent."""

    def blend(mean, value, seen):
        return torch.lerp(mean, value.to(mean.dtype), (exponent + 1) / (float(seen) + exponent + 1))

    return blend


def profiles(model, count):
    """Copies of the model with the weights' means over a shorter and shorter end of the run."""
    return [AveragedModel(model, avg_fn=power_profile(0.5 * number + 1)) for number in range(count)]


class RunTable:
    """Scalars of the run, for the notebook that plots them."""

    def __init__(self, path):
        self.db = sqlite3.connect(path)
        self.db.execute("create table scalars (step integer, tag text, value real)")

    def add(self, step, tag, value):
        with self.db:
            self.db.execute("insert into scalars values (?, ?, ?)", (step, tag, value))


def save(path, model, optimizer, images):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "images": images / 255}
    with gzip.open(path, "wb") as file:
        torch.save(state, file)


def push_preview(picture, seconds):
    time.sleep(seconds)  # the gallery answers when it has stored the picture
    return len(picture)


# ---------------------------------------------------------------- training


def train(args, folder):
    tiles, cfg = CFG["tiles"], CFG["train"]
    images, masks = draw_tiles(**tiles)
    model = UNet(CFG["model"]["widths"], tiles["classes"]).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=cfg["lr"], weight_decay=cfg["weight_decay"], fused=True
    )
    balance = Balance(
        masks, tiles["classes"], archive_records(args.archive, tiles["side"], tiles["classes"])
    )
    means = profiles(model, args.profiles)
    curve = RecallCurve(args.points) if args.points else None
    table = RunTable(folder / "run.db") if args.scalars else None
    pool, shown = ThreadPoolExecutor(1), None
    batches = endless(make_loader(args, images, masks))
    for step in range(args.steps):  # the training loop
        picture, truth = next(batches)
        x = picture.contiguous(memory_format=torch.channels_last).float().div_(127.5).sub_(1)
        truth = truth.long()
        loss, chances = segmentation_loss(model(x), truth, balance.weights, cfg["smooth"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for mean in means:
            mean.update_parameters(model)
        if curve:
            curve.update(chances, truth)
        if table:
            value = loss.item()
            for number in range(args.scalars):
                table.add(step, f"loss/{number}", value)
        if args.gallery:
            if shown:
                shown.result()
            picture = chances[0].argmax(0).byte().numpy().tobytes()
            shown = pool.submit(push_preview, picture, args.gallery / 1000)
        if args.bundled and step % CFG["save_every"] == CFG["save_every"] - 1:
            save(folder / "last.pt.gz", model, optimizer, images[: args.bundled])
    pool.shutdown()
    print(f"loss {loss.item():.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=211)
    parser.add_argument("--round-trip", type=float, default=0, help="milliseconds for a tile to arrive")
    parser.add_argument("--archive", type=int, default=0, help="tiles that set the weights of classes")
    parser.add_argument("--profiles", type=int, default=0, help="means of the weights to keep")
    parser.add_argument("--points", type=int, default=0, help="thresholds of the recall curve")
    parser.add_argument("--scalars", type=int, default=0, help="scalars of a step that go to the table")
    parser.add_argument("--bundled", type=int, default=0, help="tiles that go into a saved state")
    parser.add_argument("--gallery", type=float, default=0, help="milliseconds for a preview to be stored")
    args = parser.parse_args()
    torch.manual_seed(CFG["seed"])
    random.seed(CFG["seed"])
    with tempfile.TemporaryDirectory() as folder:
        train(args, Path(folder))


if __name__ == "__main__":
    main()
