"""Classifies variable stars by their folded light curves in three bands."""

import argparse
import random
from collections import defaultdict
from itertools import cycle, islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

KINDS, BANDS, POINTS = 6, 3, 128


def extinction(dust):
    """Returns what part of a star's light reaches us through the dust, for each band."""
    wave = np.linspace(300.0, 1100.0, 40000)
    star = (wave / 500.0) ** -5.0 / np.expm1(1.4388e7 / (wave * 5800.0))
    dimmed = star * 10.0 ** (-0.4 * dust * (550.0 / wave) ** 1.3)
    through = []
    for centre in (480.0, 620.0, 760.0):
        band = np.exp(-(((wave - centre) / 60.0) ** 2))
        through.append((dimmed * band).sum() / (star * band).sum())
    return np.array(through, dtype=np.float32)


class LightCurves(Dataset):
    def __init__(self, stars, seed, tables=0):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(0, KINDS, stars).tolist()
        phase = np.linspace(0.0, 2 * np.pi, POINTS, endpoint=False, dtype=np.float32)
        waves = np.sin(phase * (1 + np.array(self.kinds, dtype=np.float32)[:, None]))
        depth = rng.random((stars, BANDS, 1), dtype=np.float32) + 0.2
        noise = rng.standard_normal((stars, BANDS, POINTS), dtype=np.float32)
        self.flux = depth * waves[:, None] + 0.5 * noise
        self.tables, self.dust = tables, []

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, star):
        flux = np.roll(self.flux[star], int(torch.randint(POINTS, ())), axis=-1)
        if self.dust:
            flux = flux * self.dust[star % len(self.dust)][:, None]
        return torch.from_numpy(flux), self.kinds[star]


def prepare_worker(number):
    curves = get_worker_info().dataset
    curves.dust = [extinction(0.01 * (table % 300)) for table in range(curves.tables)]


class EpochSampler(Sampler):
    """Draws an epoch's stars: any, or as many of each kind from the list of all detections."""

    def __init__(self, kinds, amount, detections):
        self.kinds, self.amount, self.detections = kinds, amount, detections

    def __len__(self):
        return self.amount

    def __iter__(self):
        if not self.detections:
            yield from torch.randperm(len(self.kinds))[: self.amount].tolist()
            return
        by_kind = defaultdict(list)
        for detection in range(self.detections):
            star = detection % len(self.kinds)
            by_kind[self.kinds[star]].append(star)
        for stars in by_kind.values():
            random.shuffle(stars)
        pools = [cycle(stars) for stars in by_kind.values()]
        for number in range(self.amount):
            yield next(pools[number % len(pools)])


def block(inputs, outputs, size, stride):
    conv = nn.Conv1d(inputs, outputs, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm1d(outputs), nn.ReLU())


class Trainer:
    def __init__(self, args):
        self.steps = args.steps
        curves = LightCurves(4096, seed=3, tables=args.tables)
        self.loader = DataLoader(
            curves,
            batch_size=64,
            sampler=EpochSampler(curves.kinds, 16 * 64, args.detections),
            num_workers=2,
            worker_init_fn=prepare_worker,
            persistent_workers=args.tables == 0,
            drop_last=True,
        )
        held = LightCurves(args.validate_rows or 512, seed=4)
        self.held_flux, self.held_kinds = torch.from_numpy(held.flux), torch.tensor(held.kinds)
        self.validate_every = 10 if args.validate_rows else 200
        self.model = nn.Sequential(
            block(BANDS, 32, 7, 1),
            block(32, 64, 5, 2),
            block(64, 96, 3, 1),
            block(96, 128, 3, 2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(128, KINDS),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def stream(self):
        while True:
            yield from self.loader

    def train_step(self, flux, kinds):
        loss = F.cross_entropy(self.model(flux), kinds)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss

    @torch.inference_mode()
    def validate(self):
        self.model.eval()
        right = 0
        for flux, kinds in zip(self.held_flux.split(256), self.held_kinds.split(256), strict=False):
            right += (self.model(flux).argmax(1) == kinds).sum()
        self.model.train()
        return int(right) / len(self.held_kinds)

    def run(self):
        best = 0.0
        for step, (flux, kinds) in enumerate(islice(self.stream(), self.steps), 1):  # the training loop
            loss = self.train_step(flux, kinds)
            if step % self.validate_every == 0:
                best = max(best, self.validate())
            if step % 50 == 0:
                print(f"{step:5d}  loss {loss.item():.3f}  best accuracy {best:.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--validate-rows", type=int, default=0, help="stars to validate with")
    parser.add_argument("--detections", type=int, default=0, help="length of the list for a balanced draw")
    parser.add_argument("--tables", type=int, default=0, help="extinction tables for the augmentation")
    args = parser.parse_args()
    torch.manual_seed(3)
    random.seed(3)
    Trainer(args).run()


if __name__ == "__main__":
    main()
