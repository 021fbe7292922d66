"""Training batches that are asked for without gradients, and batches that only look like such ones."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from tests.fakes import SlowData
from tests.training_loops import BATCHES, batch, ended

pytest_plugins = ("tests.training_loops",)

EPOCHS = 3


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


class Feeder:
    """Gets batches without gradients, and begins the next epoch there, too."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.batches = loader, iter(loader)

    @torch.no_grad()
    def next_batch(self) -> torch.Tensor:
        try:
            return next(self.batches) / 2
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches) / 2


@pytest.mark.parametrize("begun_freely", [True, False])
def test_batches_asked_for_without_gradients_are_trainings_if_those_before_were(
    recorder, model, optimizer, loader, begun_freely
):
    feeder, batches = Feeder(loader), endless(loader)
    for _ in range(EPOCHS * BATCHES):
        if begun_freely:
            with torch.no_grad():
                rows = next(batches)
        else:
            rows = feeder.next_batch()
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert len(steps) == EPOCHS * BATCHES
    assert [step.times.get("data_wait", 0) for step in steps[2:]] == [2] * (len(steps) - 2)
    assert [step.samples for step in steps[2:]] == [2] * (len(steps) - 2)
    assert not any(step.times.get("evaluation", 0) for step in steps[2:])
    (fact,) = recorder.facts["loaders"]
    # One that was begun with gradients, and never asked for more, is the `Feeder`'s where it is not used.
    assert fact["epochs"] == EPOCHS + begun_freely
    assert fact["batch_size"] == 2


@pytest.mark.parametrize("fed", [True, False])
def test_a_batch_evaluated_in_each_step_is_evaluations(recorder, clock, model, optimizer, loader, fed):
    held_out = DataLoader(SlowData(clock, num_rows=40, fetch_ns=7), batch_size=1)
    others = iter(held_out)
    for rows in itertools.chain(loader, loader) if fed else [batch() for _ in range(2 * BATCHES)]:
        with torch.no_grad():
            model(next(others))
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.times.get("data_wait", 0) for step in steps] == [2 if fed else 0] * 2 * BATCHES
    assert all(step.times.get("evaluation", 0) == 107 for step in steps[1:-1])


def test_a_batch_that_is_looked_at_beside_those_of_training_is_none_of_them(
    recorder, clock, model, optimizer, loader
):
    others = iter(DataLoader(SlowData(clock, num_rows=40, fetch_ns=7), batch_size=1))
    for rows in itertools.chain(loader, loader):
        with torch.no_grad():
            assert next(others).mean() >= 0
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.times.get("data_wait", 0) for step in steps] == [2] * 2 * BATCHES
    assert [step.samples for step in steps] == [2] * 2 * BATCHES


@torch.no_grad()
def inverted(model: nn.Module, batches: Iterator[torch.Tensor]) -> float:
    """How far rows have to be moved, as an energy-based model is evaluated: by gradients, but no step."""
    far = 0.0
    for rows in batches:
        with torch.enable_grad():
            moved = rows.clone().requires_grad_()
            model(moved).sum().backward()
        far += float(moved.detach().sum())
    return far


def test_an_evaluation_by_gradients_trains_on_no_batch(recorder, clock, model, optimizer, loader):
    held_out = DataLoader(SlowData(clock, num_rows=40, fetch_ns=7), batch_size=1)
    for rows in itertools.chain(loader, loader):
        model(rows).sum().backward()
        optimizer.step()
    inverted(model, iter(held_out))
    for rows in itertools.chain(loader, loader):
        model(rows).sum().backward()
        optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * 4 * BATCHES
    assert [step.times.get("data_wait", 0) for step in steps] == [2] * 4 * BATCHES


def test_batches_asked_for_without_gradients_are_trainings_though_several_make_one_step(
    recorder, model, optimizer, loader
):
    feeder = Feeder(loader)
    for number in range(12 * BATCHES):
        model(feeder.next_batch()).sum().backward()
        if number % BATCHES == BATCHES - 1:
            optimizer.step()
    steps = ended(recorder)
    assert [step.samples for step in steps[2:]] == [2 * BATCHES] * (len(steps) - 2)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.003)
        return torch.full((4,), float(index))


@pytest.mark.alone
def test_a_loop_that_loads_without_gradients_is_told_that_it_loads(tmp_path: Path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    feeder = Feeder(DataLoader(Rows(), batch_size=4))
    diagnose.attach(tmp_path / "run")
    feeder.batches = iter(feeder.loader)
    try:
        for _ in range(100):
            model(feeder.next_batch()).sum().backward()
            optimizer.step()
            time.sleep(0.01)
    finally:
        run = diagnose.detach()
    assert "serial-loading" in [finding.rule for finding in run.findings]
    assert "frequent-evaluation" not in [finding.rule for finding in run.findings]
