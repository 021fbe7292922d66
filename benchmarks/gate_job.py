"""A short training run that can be made slower by a known time in a known phase, and knows by how much.

    python benchmarks/gate_job.py --steps 240 --slow forward --extra-us 300

The extra time is spent in a spinning wait, so that it is the same however busy the machine is. What it came
to, as a part of the rest of the step, is written to the folder `GATE_TRUTH`, one file per process.
"""

from __future__ import annotations

import argparse
import atexit
import io
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

PHASES = ("data", "forward", "backward", "optimizer", "checkpoint")
BATCH_SIZE = 32
NUM_FEATURES = 256
WIDTH = 768
SAVE_EVERY = 4
"""Steps between two checkpoints. The extra time of this phase comes in these steps alone."""

WARMUP = 20
"""Steps that the truth leaves out, as the gate does."""

extra_ns: dict[str, int] = {}
spent_ns = 0


def slow(phase: str) -> None:
    """Waits as long as this phase is to take longer."""
    global spent_ns
    wait_ns = extra_ns.get(phase, 0)
    if wait_ns:
        begun = time.perf_counter_ns()
        while time.perf_counter_ns() - begun < wait_ns:
            pass
        spent_ns += time.perf_counter_ns() - begun


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows made when they are asked for; the first of each batch waits for all of it."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.table = torch.randn(4096, NUM_FEATURES)

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index % BATCH_SIZE == 0:
            slow("data")
        row = self.table[index % 4096]
        return row * 1.01, (row[0] > 0).long()


class SlowBackward(torch.autograd.Function):
    """Passes everything through; its backward waits."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        slow("backward")
        return grads[0]


class Classifier(nn.Module):
    """Three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(NUM_FEATURES, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        slow("forward")
        return SlowBackward.apply(self.layers(x))


class SlowAdam(torch.optim.Adam):
    """Adam, whose step waits."""

    def step(self, closure: Any = None) -> Any:
        slow("optimizer")
        return super().step(closure)


class SlowToSave:
    """Waits when it is saved."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        slow("checkpoint")
        return (SlowToSave, ())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--slow", choices=PHASES)
    parser.add_argument("--extra-us", type=float, default=0.0, help="per step, on average")
    args = parser.parse_args()
    if args.slow:
        times = SAVE_EVERY if args.slow == "checkpoint" else 1
        extra_ns[args.slow] = round(1000 * args.extra_us * times)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Classifier()
    criterion = nn.CrossEntropyLoss()
    optimizer = SlowAdam(model.parameters(), lr=1e-3)
    clock = Clock()
    if os.environ.get("GATE_TRUTH"):
        atexit.register(clock.write, Path(os.environ["GATE_TRUTH"]), args.slow)
    for x, y in DataLoader(Rows(args.steps * BATCH_SIZE), BATCH_SIZE):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if clock.steps % SAVE_EVERY == 0:
            torch.save({"model": model.state_dict(), "also": SlowToSave()}, io.BytesIO())
        clock.step()


class Clock:
    """Time of the loop after the warm-up, and how much of it was extra."""

    def __init__(self) -> None:
        self.steps = 0
        self.begun = self.ended = self.before = self.after = 0

    def step(self) -> None:
        """Notes that a step is over."""
        self.steps += 1
        if self.steps == WARMUP:
            self.begun, self.before = time.perf_counter_ns(), spent_ns
        self.ended, self.after = time.perf_counter_ns(), spent_ns

    def write(self, folder: Path, phase: str | None) -> None:
        """Writes what the extra time came to."""
        extra, total = self.after - self.before, self.ended - self.begun
        truth = {
            "slow": phase,
            "steps": self.steps - WARMUP,
            "step_us": total / max(1, self.steps - WARMUP) / 1000,
            "extra_share": extra / max(1, total - extra),
        }
        (folder / f"{os.getpid()}.json").write_text(json.dumps(truth))


if __name__ == "__main__":
    main()
