"""Reads number plates from small grey pictures. Functional style, one dataclass of settings."""

from __future__ import annotations

import argparse
import gc
import json
import math
import queue
import random
import subprocess
import threading
import time
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

ALPHABET = "ABCDEFGHJKLMNPRSTUVWXYZ0123456789"
LENGTH, PIXELS, BATCH = 7, 24 * 48, 128


@dataclass
class Settings:
    steps: int
    nbest: int
    horizon: int
    ledger: int
    registry: int
    volumes: int
    download: float

    @classmethod
    def from_command_line(cls) -> Settings:
        cli = argparse.ArgumentParser()
        cli.add_argument("--steps", type=int, default=240)
        cli.add_argument("--nbest", type=int, default=0, help="readings of each plate that are scored")
        cli.add_argument("--horizon", type=int, default=0, help="steps that the schedule is planned for")
        cli.add_argument("--ledger", type=int, default=0, help="plates whose hardness is kept")
        cli.add_argument("--registry", type=int, default=0, help="owners kept at hand")
        cli.add_argument("--volumes", type=int, default=0, help="volumes whose free space is watched")
        cli.add_argument("--download", type=float, default=0, help="milliseconds per batch, fetched ahead")
        given = vars(cli.parse_args())
        return cls(**{field.name: given[field.name] for field in fields(cls)})


def make_reader() -> nn.Module:
    return nn.Sequential(
        nn.Linear(PIXELS, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, LENGTH * len(ALPHABET)),
        nn.Unflatten(1, (LENGTH, len(ALPHABET))),
    )


def to_text(codes: Tensor) -> list[str]:
    return ["".join(ALPHABET[code] for code in row) for row in codes.tolist()]


def edit_distance(guess: str, plate: str) -> int:
    previous = list(range(len(plate) + 1))
    for i, ours in enumerate(guess, 1):
        current = [i]
        for j, theirs in enumerate(plate, 1):
            current.append(min(previous[j] + 1, current[-1] + 1, previous[j - 1] + (ours != theirs)))
        previous = current
    return previous[-1]


def character_error_rate(logits: Tensor, plates: list[str], nbest: int) -> float:
    """The error of the best among some readings, as the competition counts it."""
    best = [LENGTH] * len(plates)
    for temperature in torch.linspace(0, 1, nbest).tolist():
        noisy = logits + temperature * torch.randn(len(ALPHABET))
        for place, guess in enumerate(to_text(noisy.argmax(-1))):
            best[place] = min(best[place], edit_distance(guess, plates[place]))
    return sum(best) / (LENGTH * len(plates))


def schedule_for(horizon: int):
    """Cosine decay; with a horizon it is scaled so that the mean rate is that of a constant one."""

    def shape(step: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(1.0, step / (horizon or 1000))))

    def rate(step: int) -> float:
        if not horizon:
            return shape(step)
        return shape(step) * horizon / sum(shape(k) for k in range(horizon))

    return rate


def update_ledger(ledger: dict[int, float], seen: dict[int, float]) -> None:
    for plate, hardness in ledger.items():
        ledger[plate] = 0.995 * hardness + 0.005 * seen.get(plate, 1.0)


def free_space(volumes: int) -> int:
    free = []
    for _ in range(volumes):
        answer = subprocess.run(["df", "--output=avail", "."], capture_output=True, text=True, check=True)
        free.append(int(answer.stdout.split()[-1]))
    return min(free)


def batches(settings: Settings, pictures: Tensor, codes: Tensor):
    for _ in range(settings.steps):
        index = torch.randint(len(pictures), (BATCH,))
        yield index, pictures[index], codes[index]


def ahead(source, milliseconds: float):
    """Fetches in the background what the loop will need next."""
    shelf: queue.Queue = queue.Queue(maxsize=4)

    def fetch() -> None:
        for item in source:
            time.sleep(milliseconds / 1000)
            shelf.put(item)
        shelf.put(None)

    threading.Thread(target=fetch, daemon=True).start()
    return iter(shelf.get, None)


def train(settings: Settings) -> None:
    pictures, codes = torch.rand(2048, PIXELS), torch.randint(len(ALPHABET), (2048, LENGTH))
    texts = to_text(codes)
    ledger = {number: random.random() for number in range(settings.ledger)}
    reader = make_reader()
    optimizer = torch.optim.SGD(reader.parameters(), lr=0.02, momentum=0.9, fused=True)
    scheduler = LambdaLR(optimizer, schedule_for(settings.horizon))
    gc.freeze()
    registry = [{"owner": number, "cars": [number]} for number in range(settings.registry)]
    feed = batches(settings, pictures, codes)
    if settings.download:
        feed = ahead(feed, settings.download)
    error = space = None
    for step, (index, picture, code) in enumerate(feed):  # the training loop
        logits = reader(picture)
        loss = F.cross_entropy(logits.flatten(0, 1), code.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if settings.nbest:
            plates = [texts[number] for number in index.tolist()]
            error = character_error_rate(logits.detach(), plates, settings.nbest)
        if settings.ledger:
            update_ledger(ledger, dict.fromkeys(index.tolist(), loss.item()))
        if settings.volumes:
            space = free_space(settings.volumes)
        if step % 40 == 39:
            print(json.dumps({"step": step, "loss": loss.item(), "error": error, "free": space}))
        del logits, loss
        if registry:
            gc.collect()


if __name__ == "__main__":
    random.seed(21)
    torch.manual_seed(21)
    train(Settings.from_command_line())
