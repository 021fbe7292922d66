"""Loaders that a thread drains ahead of the loop: what the loop waits for is the loader's all the same."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from diagnose.core.profile import Profile

pytestmark = pytest.mark.alone

MS = 1_000_000


class Rows(Dataset[Any]):
    """Rows that each take some milliseconds."""

    def __init__(self, sleep_ms: float) -> None:
        self.sleep_ms = sleep_ms

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_ms / 1000)
        return torch.ones(4)


class Ahead(threading.Thread):
    """An iterator that takes from another one in a thread of its own."""

    def __init__(self, batches: Any) -> None:
        super().__init__(daemon=True)
        self.items: queue.Queue[Any] = queue.Queue(4)
        self.batches = batches
        self.start()

    def run(self) -> None:
        for batch in self.batches:
            self.items.put(batch)
        self.items.put(None)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        item = self.items.get()
        if item is None:
            raise StopIteration
        return item


class LoaderAhead(DataLoader[Any]):
    def __iter__(self) -> Any:
        return Ahead(super().__iter__())


def profile_of(run_dir: Path, loader: DataLoader[Any], *, step_s: float = 0.002) -> Profile:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnose.attach(run_dir)
    for _ in range(2):
        for rows in loader:
            loss = model(rows).sum()
            time.sleep(step_s)
            loss.backward()
            optimizer.step()
    return diagnose.detach()


def rules(profile: Profile) -> set[str]:
    return {finding.rule for finding in profile.findings}


def test_a_loader_without_workers_that_a_thread_drains_too_slowly_is_named(tmp_path):
    found = profile_of(tmp_path / "run", LoaderAhead(Rows(5), batch_size=4))
    assert found.input.asked_aside
    assert found.input.batches_per_step == 1
    assert found.input.steady_wait_ns == pytest.approx(18 * MS, rel=0.25)
    assert "serial-loading" in rules(found)
    assert not rules(found) & {"slow-batch-building", "gil-contention"}
    waits = [finding for finding in found.findings if finding.rule == "blocking-call"]
    assert not any("get()" in finding.summary for finding in waits)


def test_a_thread_that_keeps_up_hides_its_loader(tmp_path):
    found = profile_of(tmp_path / "run", LoaderAhead(Rows(1), batch_size=4), step_s=0.02)
    assert found.input.asked_aside
    assert not rules(found) & {"serial-loading", "slow-batch-building"}


def test_a_loader_that_the_loop_asks_itself_is_asked_by_no_other(tmp_path):
    found = profile_of(tmp_path / "run", DataLoader(Rows(1), batch_size=4))
    assert not found.input.asked_aside
    assert "serial-loading" in rules(found)
