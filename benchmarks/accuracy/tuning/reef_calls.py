"""Names the fish that call in a clip: tank clips are in memory, reef clips come from the buoy's share."""

from __future__ import annotations

import argparse
import bz2
import itertools
import os
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

RATE, LENGTH, SPECIES = 8000, 6000, 8
SHARE_BYTES_PER_S = 15e6  # the radio link to the buoy
MASTERS = 32


@dataclass(frozen=True)
class Config:
    steps: int
    batch: int
    workers: int
    clips: int
    reef: int
    one_site: bool
    tracks: int
    restore: int
    reverb: int
    hum: int
    clean_on_read: bool


Clip = tuple[np.ndarray, int, list[np.ndarray]]


class Batch(NamedTuple):
    waves: Tensor
    species: Tensor
    tracks: list[list[np.ndarray]]


def remove_hum(wave: np.ndarray, harmonics: int) -> np.ndarray:
    """Subtracts the mains frequency and its harmonics, each fitted by least squares."""
    ticks = np.arange(len(wave)) * (2 * np.pi * 50 / RATE)
    clean = wave.astype(np.float64)
    for harmonic in range(1, harmonics + 1):
        for tone in (np.sin(harmonic * ticks), np.cos(harmonic * ticks)):
            clean -= (clean @ tone) * (2 / len(wave)) * tone
    return clean.astype(np.float32)


def restore_peaks(wave: np.ndarray, rounds: int) -> np.ndarray:
    """Guesses what an overdriven microphone cut off (Papoulis and Gerchberg)."""
    known = np.abs(wave) < 0.8 * np.abs(wave).max()
    guess = np.repeat(wave, 8).astype(np.float64)
    held = np.repeat(known, 8)
    for _ in range(rounds):
        spectrum = np.fft.rfft(guess)
        spectrum[len(spectrum) // 20 :] = 0
        guess = np.where(held, np.repeat(wave, 8), np.fft.irfft(spectrum, len(guess)))
    return guess[::8].astype(np.float32)


class TankAndReef(Dataset):
    def __init__(self, config: Config, folder: Path):
        self.config = config
        self.dice = np.random.default_rng(5)
        self.species = self.dice.integers(SPECIES, size=config.clips)
        self.tank = self.record(self.species)
        if config.hum and not config.clean_on_read:
            self.tank = np.stack([remove_hum(wave, config.hum) for wave in self.tank])
        self.reef = self.deploy(folder) if config.reef else []
        self.tracks = [self.trace() for _ in range(MASTERS)] if config.tracks else []

    def record(self, species: np.ndarray) -> np.ndarray:
        ticks = np.arange(LENGTH, dtype=np.float32) / RATE
        pitch = (120 + 60 * species).astype(np.float32)[:, None]
        calls = np.sin(2 * np.pi * np.outer(np.unique(pitch), ticks)).astype(np.float32)
        noise = self.dice.standard_normal((64, LENGTH), dtype=np.float32)
        return calls[species] + noise[self.dice.integers(64, size=len(species))]

    def deploy(self, folder: Path) -> list[Path]:
        """Fills the buoy's disk. Sites repeat, which saves time here."""
        paths = [folder / f"{number:05}.pcm.bz2" for number in range(2048)]
        for path, original in zip(paths, itertools.cycle(paths[:MASTERS]), strict=False):
            if path is original:
                sound = self.dice.normal(0, 3000, self.config.reef).astype(np.int16)
                path.write_bytes(bz2.compress(sound.tobytes()))
            else:
                os.link(original, path)
        return paths

    def trace(self) -> list[np.ndarray]:
        """How the pitch of each call goes up and down, at as many points as the call is long."""
        lengths = self.dice.integers(5, 40, self.config.tracks)
        return [self.dice.normal(400, 50, length) for length in lengths]

    def pools(self) -> list[range]:
        tank, reef = len(self.tank), len(self.reef)
        return [range(tank), range(tank, tank + reef)] if reef else [range(tank)]

    def fetch(self, path: Path) -> np.ndarray:
        packed = path.read_bytes()
        time.sleep(len(packed) / SHARE_BYTES_PER_S)
        sound = np.frombuffer(bz2.decompress(packed), np.int16)
        start = int(self.dice.integers(max(1, len(sound) - LENGTH)))
        return sound[start : start + LENGTH].astype(np.float32) / 3000

    def reverberate(self, wave: np.ndarray) -> np.ndarray:
        """As if it were recorded in a tank of other walls, which are drawn anew each time."""
        taps = self.config.reverb
        fading = np.exp(-4 * np.arange(taps) / taps)
        room = (self.dice.standard_normal(taps) * fading / taps).astype(np.float32)
        room[0] = 1
        return np.convolve(wave, room)[: len(wave)]

    def __getitem__(self, number: int) -> Clip:
        config = self.config
        if number < len(self.tank):
            wave, species = self.tank[number], int(self.species[number])
        else:
            wave, species = self.fetch(self.reef[number - len(self.tank)]), number % SPECIES
        if config.clean_on_read:
            wave = remove_hum(wave, config.hum)
        if config.restore and number % 128 == 5:
            wave = restore_peaks(wave, config.restore)
        wave = np.roll(wave, int(self.dice.integers(-400, 400))) * self.dice.uniform(0.5, 1.5)
        if config.reverb:
            wave = self.reverberate(wave)
        return wave, species, self.tracks[number % MASTERS] if self.tracks else []


class Rounds(Sampler[list[int]]):
    """Shuffled batches: a share of each pool in all of them, or one pool per batch, in turns."""

    def __init__(self, pools: list[range], size: int, one_each: bool):
        self.pools, self.size, self.one_each = pools, size, one_each
        self.dice = random.Random(11)

    def __iter__(self) -> Iterator[list[int]]:
        orders = [self.dice.sample(pool, len(pool)) for pool in self.pools]
        share = self.size if self.one_each else self.size // len(orders)
        for start in range(0, min(map(len, orders)) - share + 1, share):
            parts = [order[start : start + share] for order in orders]
            yield from parts if self.one_each else [list(itertools.chain(*parts))]


def seed_worker(_: int) -> None:
    info = get_worker_info()
    info.dataset.dice = np.random.default_rng(info.seed)


def pack(samples: list[Clip]) -> Batch:
    waves, species, tracks = zip(*samples, strict=True)
    stacked = torch.from_numpy(np.stack(waves, dtype=np.float32, casting="same_kind"))
    return Batch(stacked.unsqueeze(1), torch.tensor(species), [each for each in tracks if each])


class CallNet(nn.Sequential):
    def __init__(self, width: int = 48):
        def block(inputs: int, outputs: int, taps: int, stride: int) -> list[nn.Module]:
            conv = nn.Conv1d(inputs, outputs, taps, stride, taps // 2, bias=False)
            return [conv, nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]

        super().__init__(
            *block(1, width, 33, 16),
            *block(width, width, 5, 1),
            *block(width, 2 * width, 5, 2),
            *block(2 * width, 2 * width, 5, 2),
            nn.AdaptiveAvgPool1d(1),
            nn.Flatten(),
            nn.Linear(2 * width, SPECIES),
        )


class Trainer:
    def __init__(self, config: Config, data: TankAndReef):
        self.config = config
        self.model = CallNet()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 2e-3, config.steps)
        self.loader = DataLoader(
            data,
            batch_sampler=Rounds(data.pools(), config.batch, config.one_site),
            collate_fn=pack,
            num_workers=config.workers,
            worker_init_fn=seed_worker,
            persistent_workers=True,
        )

    def batches(self) -> Iterator[Batch]:
        while True:
            yield from self.loader

    def fit(self) -> None:
        self.model.train()
        for step, batch in enumerate(
            itertools.islice(self.batches(), self.config.steps), 1
        ):  # the training loop
            loss = F.cross_entropy(self.model(batch.waves), batch.species)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.3f}, {sum(map(len, batch.tracks))} tracks")


def configure() -> Config:
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--steps", type=int, default=211)
    cli.add_argument("--batch", type=int, default=16)
    cli.add_argument("--workers", type=int, default=2)
    cli.add_argument("--clips", type=int, default=4096, help="clips of the tank")
    cli.add_argument("--reef", type=int, default=0, help="samples of a recording on the buoy; 0: tank only")
    cli.add_argument("--one-site", action="store_true", help="no batch has clips of both tank and reef")
    cli.add_argument("--tracks", type=int, default=0, help="pitch tracks of a clip, for the report")
    cli.add_argument("--restore", type=int, default=0, help="rounds to restore an overdriven clip in")
    cli.add_argument("--reverb", type=int, default=0, help="taps of the random room responses")
    cli.add_argument("--hum", type=int, default=0, help="harmonics of the mains to take away")
    cli.add_argument("--clean-on-read", action="store_true", help="when a clip is read, not at the start")
    args = cli.parse_args()
    return Config(**{field.name: getattr(args, field.name) for field in fields(Config)})


def main() -> None:
    torch.manual_seed(3)
    torch.set_num_threads(1)  # the other CPU is for the workers
    config = configure()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(config, TankAndReef(config, Path(folder))).fit()


if __name__ == "__main__":
    main()
