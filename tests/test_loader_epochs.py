"""Epochs of the loaders that feed training: where they begin, and where `iter(loader)` is charged."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from diagnose.core.phases import Phase
from tests.fakes import FakeClock, SlowData, SlowModel, SlowOptimizer, measured, steps_of
from tests.test_loader_facts import MS, ROWS, train


@pytest.mark.parametrize("broken_off", [False, True])
def test_the_steps_that_begin_an_epoch_are_known(tmp_path, broken_off):
    diagnose.attach(tmp_path / "run", warmup=0)
    loader = DataLoader(ROWS, batch_size=4)
    train(loader, epochs=3, steps=5 if broken_off else None)
    profile = diagnose.detach()
    assert profile.input.epoch_starts == 3
    assert profile.input.batches_per_step == 1


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_begun_for_each_batch_is_a_wait_for_workers_and_none_for_a_loader_without(
    tmp_path: Path, num_workers: int
):
    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.001)
            return (torch.zeros(4),)

    diagnose.attach(tmp_path / "run", warmup=0)
    loader = DataLoader(Slow(), batch_size=8, num_workers=num_workers, persistent_workers=num_workers > 0)
    train(loader, epochs=40, steps=0)
    found = diagnose.detach().input
    assert found.batches_per_step == 1
    assert found.epoch_start_ns is not None and found.steady_wait_ns is not None
    if num_workers:
        assert found.epoch_start_ns > 8 * MS and found.steady_wait_ns == 0
    else:
        assert found.steady_wait_ns > 8 * MS and found.epoch_start_ns == 0


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
def test_epochs_of_one_batch_are_steps_like_others(tmp_path: Path):
    diagnose.attach(tmp_path / "run", warmup=0)
    train(DataLoader(ROWS, batch_size=48, num_workers=1, persistent_workers=True), epochs=20)
    found = diagnose.detach().input
    assert (found.epoch_start_ns, found.batches_per_step) == (0, 1)


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_random_numbers_drawn_before_a_sampler_has_drawn_its_own_are_told(draws, shuffle):
    with measured(
        FakeClock(), "dataloader", "loader-facts", "forward", "backward", "optimizer"
    ) as recorder:
        model = nn.Linear(4, 1)
        for _ in range(2):
            batches = iter(DataLoader(ROWS, batch_size=4, shuffle=shuffle))
            if draws:
                model.reset_parameters()
            for (rows,) in batches:
                model(rows).sum().backward()
                torch.rand(1)  # as a dropout does
    assert recorder.facts.get("drawn_before_batch", False) is (draws and shuffle)


def test_making_an_iterator_is_time_spent_waiting_for_data():
    class Sampler:
        def __init__(self) -> None:
            self.clock = clock

        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Any:
            self.clock.spend(40)
            return iter([0, 1])

    clock = FakeClock()
    with measured(clock, "dataloader", "loader-facts", "forward", "backward", "optimizer") as recorder:
        model = SlowModel(clock, forward_ns=3)
        optimizer = SlowOptimizer(clock, model, 5)
        loader = DataLoader(SlowData(clock, 2, 7), batch_size=1, sampler=Sampler())  # type: ignore[arg-type]
        for _ in range(2):
            batches = iter(loader)
            clock.spend(2)  # not the loader's
            for rows in batches:
                model(rows).sum().backward()
                optimizer.step()
        recorder.finish()
        steps = steps_of(recorder)
        (fact,) = recorder.facts["loaders"]
    assert [step.times["data_wait"] for step in steps] == [47, 7, 47, 7]
    assert fact["total_construct_ns"] == 0, "torch asks the sampler at the first `next`"
    assert [start[:2] for start in fact["starts"]] == [[0, 0], [2, 2]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
def test_starting_workers_is_time_spent_waiting_for_data_and_charged_to_the_epochs_beginning(tmp_path):
    class Slow(Dataset[Any]):
        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> Any:
            return (torch.zeros(4),)

    diagnose.attach(tmp_path / "run", warmup=0)
    train(DataLoader(Slow(), batch_size=8, num_workers=1), epochs=4)
    profile = diagnose.detach()
    (loader,) = profile.program.loaders
    assert loader.construct_ns > 1 * MS
    assert profile.input.epoch_start_ns is not None
    per_epoch = profile.input.epoch_start_ns * profile.steps.measured / profile.input.epoch_starts
    assert per_epoch > 0.5 * loader.construct_ns
    assert profile.input.epoch_start_ns < profile.phase_time_ns[Phase.DATA_WAIT]
    computing = sum(
        profile.phase_time_ns[phase] for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    )
    assert profile.input.epoch_start_compute_ns is not None
    assert 0 <= profile.input.epoch_start_compute_ns < computing


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
def test_workers_that_only_evaluate_are_not_counted(tmp_path):
    diagnose.attach(tmp_path / "run")
    evaluating = DataLoader(ROWS, batch_size=2, num_workers=1)
    with torch.no_grad():
        list(evaluating)
    train(DataLoader(ROWS, batch_size=4, num_workers=1), epochs=2)
    with torch.no_grad():
        list(evaluating)
    workers = diagnose.detach().input.workers
    assert workers is not None
    assert (workers.num_workers, workers.batches) == (2, 24)
