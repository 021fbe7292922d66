"""A model, an optimizer and a loader that take known times, and the steps that are found of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.hooks._recorder import Recorder
from tests.fakes import FakeClock, SlowData, SlowModel, SlowOptimizer, Step, measured, steps_of

BATCHES = 4


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder(clock: FakeClock) -> Iterator[Recorder]:
    with measured(clock) as recorder:
        yield recorder
        assert not recorder.notes


@pytest.fixture
def model(clock: FakeClock) -> SlowModel:
    return SlowModel(clock, forward_ns=100, backward_ns=200)


@pytest.fixture
def optimizer(clock: FakeClock, model: SlowModel) -> SlowOptimizer:
    return SlowOptimizer(clock, model, step_ns=10)


@pytest.fixture
def loader(clock: FakeClock) -> DataLoader[Any]:
    """Four batches of two samples, 2 ns each."""
    return DataLoader(SlowData(clock, num_rows=2 * BATCHES, fetch_ns=1), batch_size=2)


def ended(recorder: Recorder) -> list[Step]:
    """The steps of a script that has come to its end."""
    recorder.finish()
    return steps_of(recorder)


def batch(rows: int = 2) -> torch.Tensor:
    return torch.ones(rows, 4)
