"""Learns tags of synthetic sound clips. A small trainer class keeps the books."""

import json
import os
import sys
from argparse import ArgumentParser
from math import pi, sin
from time import sleep

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

RATE = 400


class Clips(Dataset):
    """Clips that exist as text, as some archives have them."""

    def __init__(self, amount: int, parse: int, network: float):
        self.amount, self.parse, self.network = amount, parse, network
        self.text = ",".join(f"{sin(2 * pi * tick / 50):.5f}" for tick in range(RATE))
        self.wave = torch.tensor([float(part) for part in self.text.split(",")])

    def __len__(self) -> int:
        return self.amount

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.network > 0:
            sleep(self.network)
        for _ in range(self.parse):
            [float(part) for part in self.text[:400].split(",") if part]
        return {"wave": self.wave * (1 + index % 3), "tag": torch.tensor(index % 3)}


class Joiner:
    def __init__(self, windows: int):
        self.windows = windows

    def __call__(self, clips: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        for clip in clips:
            for start in range(self.windows):
                clip["wave"][start % 100 : start % 100 + 16].mean()
        return {key: torch.stack([clip[key] for clip in clips]) for key in ("wave", "tag")}


class Trainer:
    def __init__(self, options):
        self.options = options
        self.network = nn.Sequential(
            nn.Linear(RATE, 384), nn.SiLU(), nn.Linear(384, 384), nn.SiLU(), nn.Linear(384, 3)
        )
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.05, nesterov=True, momentum=0.8)
        self.losses: list[float] = []
        self.archive = [list(range(1000)) for _ in range(options.archive)]

    def loader(self, batches: int) -> DataLoader:
        clips = Clips(batches * 48, self.options.parse, self.options.network / 1000)
        return DataLoader(clips, batch_size=48, collate_fn=Joiner(self.options.windows))

    def step(self, batch: dict[str, Tensor]) -> float:
        self.optimizer.zero_grad()
        for wave, tag in zip(batch["wave"].split(16), batch["tag"].split(16), strict=True):
            (nn.functional.cross_entropy(self.network(wave), tag) / 3).backward()
        self.optimizer.step()
        return float(next(self.network.parameters()).grad.abs().max())

    def write_books(self, number: int) -> None:
        for _ in range(self.options.books):
            with open("books.json", "w") as books:
                json.dump({"step": number, "losses": self.losses[-20:]}, books)
                books.flush()
                os.fsync(books.fileno())

    def keep(self) -> None:
        torch.save({"net": self.network.state_dict(), "archive": self.archive}, "kept.bin")

    def validate(self) -> float:
        self.network.train(False)
        with torch.inference_mode():
            wave = torch.randn(64, RATE)
            score = sum(float(self.network(wave).mean()) for _ in range(self.options.validate))
        self.network.train(True)
        return score

    def fit(self) -> None:
        for number, batch in enumerate(self.loader(self.options.steps)):  # the training loop
            self.losses.append(self.step(batch))
            self.write_books(number)
            if number % 15 == 14:
                if self.archive:
                    self.keep()
                if self.options.validate:
                    print("validation", self.validate(), file=sys.stderr)


if __name__ == "__main__":
    cli = ArgumentParser()
    cli.add_argument("--steps", type=int, default=146)
    cli.add_argument("--parse", type=int, default=0, help="times that a clip's text is parsed")
    cli.add_argument("--network", type=float, default=0, help="milliseconds to fetch a clip")
    cli.add_argument("--windows", type=int, default=0, help="windows per clip that collate looks at")
    cli.add_argument("--books", type=int, default=0, help="files rewritten each step")
    cli.add_argument("--archive", type=int, default=0, help="lists that go into each checkpoint")
    cli.add_argument("--validate", type=int, default=0, help="batches of each validation")
    torch.manual_seed(3)
    Trainer(cli.parse_args()).fit()
