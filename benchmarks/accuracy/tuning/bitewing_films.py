"""Finds caries on bitewing radiographs: one score for each surface of each tooth."""

import argparse
import json
import random
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

SURFACES = 160
FILM, SMALL = 96, 48


@dataclass(frozen=True)
class Config:
    steps: int
    neighbours: int
    audit: int
    films: int = 400
    batch: int = 16
    rate: float = 2e-3


def pack(rng, size):
    rows, columns = np.mgrid[:size, :size] / size
    film = 128 + 60 * np.sin(9 * rows + rng.uniform(0, 6)) * np.cos(7 * columns + rng.uniform(0, 6))
    film += 8 * rng.standard_normal((size, size), dtype=np.float32)
    return zlib.compress(film.clip(0, 255).astype(np.uint8).tobytes(), 3)


def unpack(packed, size):
    return np.frombuffer(zlib.decompress(packed), np.uint8).reshape(size, size)


def equalise(film):
    spread = np.bincount(film.ravel(), minlength=256).cumsum()
    return (spread / spread[-1]).astype(np.float32)[film]


class Bitewings(Dataset):
    """A film, and beside it the mean of other films of the same practice as a background."""

    def __init__(self, amount, neighbours):
        rng = np.random.default_rng(31)
        self.films = [pack(rng, FILM) for _ in range(amount)]
        self.practice = [pack(rng, SMALL) for _ in range(200)]
        self.caries = torch.from_numpy((rng.random((amount, SURFACES)) < 0.1).astype(np.float32))
        self.neighbours = neighbours

    def __len__(self):
        return len(self.films)

    def background(self):
        total = np.zeros((SMALL, SMALL), dtype=np.float32)
        for packed in random.choices(self.practice, k=self.neighbours):
            total += equalise(unpack(packed, SMALL)) ** 0.8
        return (total / max(1, self.neighbours)).repeat(2, axis=0).repeat(2, axis=1)

    def __getitem__(self, number):
        film = equalise(unpack(self.films[number], FILM))
        if random.random() < 0.5:
            film = film[:, ::-1]
        return torch.from_numpy(np.stack([film, self.background()])), self.caries[number], number


def build_model():
    layers, before = [], 2
    for after, stride in [(16, 2), (32, 2), (64, 2), (64, 1)]:
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, SURFACES))


def record(folder, step, numbers, logits, caries, surfaces):
    scores = logits.detach().sigmoid().tolist()
    for number, own, truth in zip(numbers.tolist(), scores, caries.tolist(), strict=True):
        for surface, score in enumerate(own[:surfaces]):
            entry = {"step": step, "surface": surface, "score": round(score, 4), "caries": truth[surface]}
            with open(folder / f"film_{number:04d}.jsonl", "a") as file:
                file.write(json.dumps(entry) + "\n")


def endless(loader):
    while True:
        yield from loader


def train(config, folder):
    films = Bitewings(config.films, config.neighbours)
    loader = DataLoader(
        films, config.batch, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True
    )
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.rate, momentum=0.9, fused=True)
    criterion = nn.BCEWithLogitsLoss()
    feed = endless(loader)
    step = 0
    while step < config.steps:  # the training loop
        images, caries, numbers = next(feed)
        step += 1
        logits = model(images)
        loss = criterion(logits, caries)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if config.audit:
            record(folder, step, numbers, logits, caries, config.audit)
        if step % 50 == 0:
            print(f"{step}: {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--neighbours", type=int, default=0, help="films that make up the background")
    parser.add_argument("--audit", type=int, default=0, help="surfaces of a film that the audit trail has")
    config = Config(**vars(parser.parse_args()))
    torch.manual_seed(31)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        train(config, Path(folder))


if __name__ == "__main__":
    main()
