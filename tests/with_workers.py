"""A loop whose loader has workers, and what is measured of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from diagnose.core.input import WorkerStats
from diagnose.core.profile import Profile

MS = 1_000_000


def busy(seconds: float) -> None:
    """Takes CPU time, however much of a CPU there is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Rows(Dataset[Any]):
    """Rows that each take some milliseconds."""

    def __init__(self, num_rows: int, *, sleep_ms: float = 0, busy_ms: float = 0) -> None:
        self.num_rows, self.sleep_ms, self.busy_ms = num_rows, sleep_ms, busy_ms

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_ms / 1000)
        busy(self.busy_ms / 1000)
        return torch.full((2,), float(index))


class Notes(Dataset[Any]):
    """Samples of which each holds a tensor and some texts."""

    def __init__(self, num_texts: int) -> None:
        self.num_texts = num_texts

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, list[str]]:
        return torch.full((2,), float(index)), [f"note {index}"] * self.num_texts


def train(batches: Iterable[Any], step_s: float = 0.0) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in batches:
        model(rows).sum().backward()
        optimizer.step()
        time.sleep(step_s)


def profile_of(run_dir: Path, loader: DataLoader[Any], *, epochs: int = 1, step_s: float = 0.0) -> Profile:
    diagnose.attach(run_dir)
    try:
        for _ in range(epochs):
            train(loader, step_s)
    finally:
        profile = diagnose.detach()
    return profile


def workers_of(profile: Profile) -> WorkerStats:
    assert profile.input.workers is not None
    return profile.input.workers
