"""Which batches feed training where a trainer switches back to it late, and the data is evaluated, too."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import diagnose
from tests.fakes import SlowData
from tests.training_loops import BATCHES, ended

pytest_plugins = ("tests.training_loops",)


def test_a_trainer_that_switches_back_with_the_batch_in_hand_waits_for_data(
    recorder, clock, model, optimizer, loader
):
    """As Hugging Face's does, and Lightning's, which sets the mode without calling `train()`."""
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for _ in range(3):
        for rows in loader:
            model.train()
            model(rows).sum().backward()
            optimizer.step()
        model.eval()
        for rows in held_out:
            with torch.no_grad():
                model(rows)
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * 3 * BATCHES
    assert [step.times["data_wait"] for step in steps] == [2] * 3 * BATCHES
    assert [step.times.get("evaluation", 0) for step in steps] == [0] * 4 + ([321] + [0] * 3) * 2


def test_an_epoch_goes_on_after_an_evaluation_that_does_not_switch_back(
    recorder, clock, model, optimizer, loader
):
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for index, rows in enumerate(loader):
        model.train()
        model(rows).sum().backward()
        optimizer.step()
        if index == 1:
            model.eval()
            for more in held_out:
                with torch.no_grad():
                    model(more)
    steps = ended(recorder)
    assert [step.times["data_wait"] for step in steps] == [2] * BATCHES
    assert [step.times.get("evaluation", 0) for step in steps] == [0, 321, 0, 0]


def test_the_training_data_evaluated_after_other_data_is_evaluation(
    recorder, clock, model, optimizer, loader
):
    held_out = DataLoader(SlowData(clock, num_rows=3, fetch_ns=7), batch_size=1)
    for _ in range(2):
        model.train()
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
        for each in (held_out, loader):
            model.eval()
            for rows in each:
                with torch.no_grad():
                    model(rows)
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * 2 * BATCHES
    assert [step.times.get("evaluation", 0) for step in steps] == [0] * 4 + [321 + 408] + [0] * 3


def test_the_training_data_evaluated_in_the_same_mode_is_evaluation(
    recorder, clock, model, optimizer, loader
):
    for _ in range(2):
        model.train()
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
        model.eval()
        for rows in loader:
            with torch.no_grad():
                model(rows)
    steps = ended(recorder)
    assert [step.times["data_wait"] for step in steps] == [2] * 2 * BATCHES
    assert [step.times.get("evaluation", 0) for step in steps] == [0] * 4 + [408] + [0] * 3


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
@pytest.mark.parametrize("persistent", [True, False])
def test_the_workers_of_a_loader_feed_training_in_each_epoch(tmp_path, persistent):
    rows = TensorDataset(torch.zeros(48, 4))
    loader = DataLoader(rows, batch_size=4, num_workers=1, persistent_workers=persistent)
    held_out = DataLoader(rows, batch_size=4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    diagnose.attach(tmp_path / "run", warmup=0)
    for _ in range(3):
        for (ready,) in loader:
            model.train()
            model(ready).sum().backward()
            optimizer.step()
        model.eval()
        for (ready,) in held_out:
            with torch.no_grad():
                model(ready)
    profile = diagnose.detach()
    (known,) = profile.program.loaders
    workers = profile.input.workers
    assert workers is not None
    assert (known.epochs, workers.num_workers) == (3, 1 if persistent else 3)
    assert persistent or workers.batches == 36, "one that is kept tells of the last of them when it ends"


@pytest.mark.parametrize("persistent", [True, False])
def test_what_is_evaluated_after_an_epoch_is_no_batch_of_it(recorder, model, optimizer, persistent):
    rows = torch.ones(8, 4)
    loader = DataLoader(list(rows), batch_size=2, num_workers=1, persistent_workers=persistent)
    for _ in range(3):
        for ready in loader:
            model(ready).sum().backward()
            optimizer.step()
        with torch.no_grad():
            model(rows)
    steps = ended(recorder)
    assert [step.samples for step in steps] == [2] * 12
