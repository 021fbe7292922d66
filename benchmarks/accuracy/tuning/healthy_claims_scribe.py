"""Insurance claims: a cross network on mixed columns.

States are written by a thread of their own while training goes on, and a second thread raises the alarm
if the loop has not moved for a minute. Neither has anything to do most of the time.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

NUMBERS, CATEGORIES, LEVELS, ROWS = 32, 12, 400, 60_000


@dataclass(frozen=True)
class Claims:
    numbers: Tensor
    categories: Tensor
    costs: Tensor

    @classmethod
    def invented(cls) -> Claims:
        dice = torch.Generator().manual_seed(1900)
        numbers = torch.randn(ROWS, NUMBERS, generator=dice)
        categories = torch.randint(LEVELS, (ROWS, CATEGORIES), generator=dice)
        risk = torch.randn(LEVELS, generator=dice)[categories].sum(1) / 3
        return cls(numbers, categories, risk + numbers[:, 0] * numbers[:, 1])

    def batches(self, size: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        dice = torch.Generator().manual_seed(7)
        while True:
            for rows in torch.randperm(ROWS, generator=dice).split(size):
                yield self.numbers[rows], self.categories[rows], self.costs[rows]


class Cross(nn.Module):
    """One layer of a cross network of the second version (Wang et al. 2021)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        return torch.addcmul(x, first, self.linear(x))


class Estimator(nn.Module):
    def __init__(self):
        super().__init__()
        width = NUMBERS + 16 * CATEGORIES
        self.levels = nn.Embedding(LEVELS * CATEGORIES, 16)
        self.register_buffer("offsets", torch.arange(CATEGORIES) * LEVELS)
        self.crosses = nn.ModuleList(Cross(width) for _ in range(3))
        self.deep = nn.Sequential(nn.Linear(width, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.cost = nn.Linear(512, 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        first = torch.cat([numbers, self.levels(categories + self.offsets).flatten(1)], 1)
        x = first
        for cross in self.crosses:
            x = cross(first, x)
        return self.cost(self.deep(x)).squeeze(1)


class Scribe(threading.Thread):
    """Writes the states that it is handed, and keeps the last three."""

    def __init__(self, folder: Path):
        super().__init__(name="scribe")
        self.folder = folder
        self.desk: queue.Queue[tuple[int, dict[str, Tensor]] | None] = queue.Queue(maxsize=1)

    def hand_over(self, step: int, model: nn.Module) -> None:
        """Copies the state, which goes on changing, and returns."""
        self.desk.put((step, {name: value.detach().clone() for name, value in model.state_dict().items()}))

    def run(self) -> None:
        written: list[Path] = []
        while (work := self.desk.get()) is not None:
            step, state = work
            written.append(self.folder / f"{step:06}.pt")
            torch.save(state, written[-1])
            if len(written) > 3:
                written.pop(0).unlink()


class Watchman(threading.Thread):
    """Looks every five seconds whether the loop has moved."""

    def __init__(self, patience: float = 60):
        super().__init__(name="watchman", daemon=True)
        self.patience, self.moved, self.home = patience, time.monotonic(), threading.Event()

    def run(self) -> None:
        while not self.home.wait(5):
            if time.monotonic() - self.moved > self.patience:
                print("the loop stands still", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=240)
    steps = parser.parse_args().steps

    torch.manual_seed(1900)
    model = Estimator()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    watchman = Watchman()
    watchman.start()
    total = torch.zeros(())
    with tempfile.TemporaryDirectory() as folder:
        scribe = Scribe(Path(folder))
        scribe.start()
        for step, (numbers, categories, costs) in enumerate(
            Claims.invented().batches(1024), 1
        ):  # the training loop
            loss = nn.functional.huber_loss(model(numbers, categories), costs)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            watchman.moved = time.monotonic()
            if step % 60 == 0:
                scribe.hand_over(step, model)
            if step == steps:
                break
        scribe.desk.put(None)
        scribe.join()
    watchman.home.set()
    print(f"mean loss {total.item() / steps:.4f}")


if __name__ == "__main__":
    main()
