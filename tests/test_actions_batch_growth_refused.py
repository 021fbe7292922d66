"""Where batches do not grow: schedules, rates and loaders that forbid it, or nobody who counts samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset

from diagnose.actions import batch_growth
from diagnose.actions.base import CannotApply
from diagnose.actions.batch_growth import BatchGrowth
from diagnose.core.trial import Safety
from diagnose.tuner.policy import Policy
from tests.loops import Rows, Switch, begin
from tests.simulated_job import Change, Machine, controller
from tests.test_actions_batch_growth import Job, a_model, epochs, on


def test_a_schedule_that_goes_by_epochs_is_left_alone():
    model, optimizer = a_model()
    schedule = StepLR(optimizer, 1)
    job = Job(models=[model], optimizers=[optimizer])

    def step(batch: torch.Tensor) -> None:
        optimizer.step()
        if 79 in batch[:, 0]:
            schedule.step()

    list(epochs(DataLoader(Rows(80), 4), 3, {5: on(2)}, step=step, job=job))
    assert schedule.last_epoch == 3


def test_a_script_that_sets_the_rate_itself_in_each_step_is_refused():
    model, optimizer = a_model()
    job, action, said = Job(models=[model], optimizers=[optimizer]), BatchGrowth(), []

    def step(batch: torch.Tensor) -> None:
        optimizer.param_groups[0]["lr"] *= 0.99
        optimizer.step()

    def look(switch: Switch) -> None:
        said.append(action.why_not_stay(switch.prepare(2)))
        with pytest.raises(CannotApply, match="sets the learning rate in each step"):
            switch.on(2)

    list(epochs(DataLoader(Rows(80), 4), 1, {2: on(2), 8: look}, step=step, job=job, action=action))
    assert said and said[0]


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(80.0).view(40, 2))


class Own(torch.utils.data.BatchSampler):
    """A batch sampler of the user's."""


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: DataLoader(Stream(), 4), "an IterableDataset decides by itself"),
        (lambda: DataLoader(Rows(80), batch_size=None), "each of its samples is one"),
        (lambda: DataLoader(Rows(80), batch_sampler=Own(range(80), 4, False)), "with a Own"),
        (lambda: DataLoader(Rows(28), 4), "an epoch has 7 batches only"),
    ],
)
def test_loaders_whose_batches_cannot_grow_are_refused(make, reason):
    model, optimizer = a_model()
    job = Job(models=[model], optimizers=[optimizer])
    batches = begin(job, make())
    with pytest.raises(CannotApply, match=reason):
        BatchGrowth().check(job)
    del batches


def test_several_loaders_or_none_are_refused():
    model, optimizer = a_model()
    job = Job(models=[model], optimizers=[optimizer])
    with pytest.raises(CannotApply, match="no DataLoader feeds"):
        BatchGrowth().check(job)
    both = [begin(job, DataLoader(Rows(80), 4)) for _ in range(2)]
    with pytest.raises(CannotApply, match="several loaders"):
        BatchGrowth().check(job)
    del both


def test_a_step_that_may_not_find_the_memory_is_refused(monkeypatch):
    model, optimizer = a_model()
    job = Job(models=[model], optimizers=[optimizer])
    batches = begin(job, DataLoader(Rows(160), 4))
    monkeypatch.setattr(batch_growth, "resident_bytes", lambda: 1 << 30)
    for available, values in ((2 << 30, [2]), (4 << 30, [2, 4]), (1 << 30, [])):
        monkeypatch.setattr(batch_growth, "available_bytes", lambda available=available: available)
        assert BatchGrowth().values(job) == values
        assert BatchGrowth().largest(job) == max(values, default=None), "also of what a file names"
    with pytest.raises(CannotApply, match="more memory for a larger batch than is free"):
        BatchGrowth().check(job)
    del batches


def test_a_step_that_raises_leaves_the_scripts_rate_in_the_end():
    model, optimizer = a_model()
    job = Job(models=[model], optimizers=[optimizer])
    batches = begin(job, DataLoader(Rows(80), 4))
    action = BatchGrowth()
    with ExitStack() as stack:
        ready = stack.enter_context(action.prepare(job, 2))
        stack.enter_context(action.apply(job, ready))
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(_interrupted)
    assert optimizer.param_groups[0]["lr"] == 1e-5
    del batches


def _interrupted() -> float:
    raise KeyboardInterrupt


def test_where_nobody_counts_samples_it_is_refused():
    machine = Machine()
    growth = Change(machine, "growth", factor=1.4, safety=Safety.TRAINING)
    growth.resizes = True  # type: ignore[misc]
    policy = Policy(only=frozenset({"growth"}), allowed=frozenset({Safety.TRAINING}))
    control = controller(machine, [growth], [], policy=policy)
    for _ in range(600):
        machine.now += machine.step_ns()
        machine.steps += 1
        control.boundary(machine.steps, aside=False)
    assert machine.outcomes() == {"growth": "refused"}
    assert "no loader tells how many" in machine.trials()[0]["reason"]
    assert not machine.factors
