"""A worker that goes on with the training process's random numbers: nothing can be told from no worker."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from diagnose.actions._loader_continued import DRAWS, States
from diagnose.actions._loader_switch import feed_of
from diagnose.actions.base import CannotApply
from diagnose.actions.fork_continuation import ForkContinuation
from diagnose.core.job import Job
from tests.loops import Log, Noisy, Rows, Switch, begin, close, off

MADE_HERE = Log()


class Seen(Noisy):
    """Rows with random numbers; notes which of them the training process has made."""

    def __getitem__(self, index: int) -> torch.Tensor:
        MADE_HERE.say(index)
        return super().__getitem__(index)


class NoisyPairs(Dataset[dict[str, Any]]):
    """Samples that are no tensors, some of which draw nothing."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = random.choice("abc") if index % 3 else ""
        return {"text": drawn, "row": np.random.rand(2) if index % 2 else np.zeros(2)}


Make = Callable[[], "DataLoader[Any]"]
KINDS: dict[str, Make] = {
    "in order": lambda: DataLoader(Seen(), 4),
    "shuffle": lambda: DataLoader(Seen(), 4, shuffle=True),
    "generator": lambda: DataLoader(Seen(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "with replacement": lambda: DataLoader(
        Seen(), 4, sampler=RandomSampler(Seen(), replacement=True, num_samples=50), drop_last=True
    ),
    "weighted": lambda: DataLoader(
        Seen(), 4, sampler=WeightedRandomSampler(torch.arange(1.0, 38.0).tolist(), 40)
    ),
    "dictionaries": lambda: DataLoader(NoisyPairs(), 4, shuffle=True),
    "one by one": lambda: DataLoader(Seen(21), batch_size=None, shuffle=True),
}


def on(switch: Switch) -> None:
    switch.on(None)


Plan = dict[int, Callable[[Switch], None]]
PLANS: dict[str, Plan] = {
    "to the end": {2: on},
    "on and off in the middle": {1: on, 4: off, 6: on, 15: off, 17: on, 19: close, 21: on},
    "at both ends": {0: on, 9: off, 10: on, 11: off, 12: on},
}


def trained(
    make: Make,
    plan: Plan,
    *,
    epochs: int = 3,
    stop_at: int = -1,
    each: Callable[[int], object] = lambda number: None,
    action: ForkContinuation | None = None,
) -> Iterator[Any]:
    """Iterates over a loader; yields each batch and the generators after it, and in the end.

    Args:
        make: Makes the loader.
        plan: What to do before a batch is asked for, by its number.
        epochs: How often.
        stop_at: Leave each epoch after so many batches.
        each: Called after each batch with its number.
        action: The action.
    """
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    loader, job, asked = make(), Job(), 0
    switch: Switch | None = None
    try:
        for _ in range(epochs):
            batches = begin(job, loader)
            switch = switch or Switch(action or ForkContinuation(), job)
            for number in range(1000):
                plan.get(asked, lambda switch: None)(switch)
                asked += 1
                if number == stop_at:
                    break
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                yield batch
                yield States.now()
                each(asked)
            del batches
    finally:
        if switch is not None:
            switch.close()
    yield States.now()
    if loader.generator is not None:
        yield loader.generator.get_state()


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [flat(value[key]) for key in sorted(value)]
    return value.tolist() if isinstance(value, torch.Tensor) else [value]


def assert_same(make: Make, plan: Plan, **more: Any) -> None:
    """With the worker and without, a loop gets the same batches and finds the same generators."""
    MADE_HERE.heard()
    alone = [flat(each) for each in trained(make, {}, **{k: v for k, v in more.items() if k != "action"})]
    made_alone = len(MADE_HERE.heard())
    MADE_HERE.heard()
    ours = [flat(each) for each in trained(make, plan, **more)]
    assert ours == alone
    if plan == PLANS["to the end"] and made_alone and "each" not in more:
        assert len(MADE_HERE.heard()) < made_alone / 2, "the worker has made them"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_batches_and_all_random_numbers_are_those_of_a_loop_without_a_worker(kind, plan):
    assert_same(KINDS[kind], PLANS[plan])


@pytest.mark.parametrize("stop_at", [3, 5])
def test_a_loop_that_leaves_its_epochs_early_finds_the_generators_where_they_would_be(stop_at):
    assert_same(KINDS["shuffle"], {1: on}, stop_at=stop_at, epochs=5)


def test_an_evaluation_that_draws_now_and_then_makes_it_begin_again():
    action, prepared = ForkContinuation(), []

    def put_in(switch: Switch) -> None:
        on(switch)
        prepared.extend(switch.prepare(None))

    def evaluate(number: int) -> None:
        if not number % 7:
            torch.rand(3)

    assert_same(KINDS["shuffle"], {1: put_in}, each=evaluate, epochs=5, action=action)
    assert action.why_not_stay(prepared) == ""
    assert len(MADE_HERE.heard()) < 5 * 37 * 0.75


def test_a_loop_that_draws_in_each_step_is_left_alone_and_the_numbers_are_still_its_own():
    action, said = ForkContinuation(), []

    def look(switch: Switch) -> None:
        said.append(action.why_not_stay(switch.prepare(None)))
        with pytest.raises(CannotApply, match="draws random numbers itself"):
            on(switch)

    assert_same(
        KINDS["shuffle"], {1: on, 8 + 2 * DRAWS: look}, each=lambda number: torch.rand(1), action=action
    )
    assert "draws random numbers itself between two batches" in said[0]


def test_a_worker_that_is_killed_loses_no_batch_and_no_number():
    workers = []

    def put_in(switch: Switch) -> None:
        on(switch)
        workers.extend(switch.prepare(None)[0].workers._workers)

    def kill(switch: Switch) -> None:
        os.kill(workers[0].pid, signal.SIGKILL)

    assert_same(KINDS["shuffle"], {1: put_in, 6: kill}, each=lambda number: None)


class Torn(Noisy):
    """A sample that cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        if index == 22:
            raise OSError("sample 22 is torn")
        return sample


def test_an_error_of_the_dataset_comes_where_it_would_have_with_the_same_generators():
    ends = []
    for plan in ({}, {1: on}):
        seen: list[Any] = []
        with pytest.raises(OSError, match="sample 22 is torn"):
            seen.extend(map(flat, trained(lambda: DataLoader(Torn(), 4), plan)))
        ends.append(States.now())
    assert ends[0] == ends[1]


def test_several_batches_are_ready_before_they_are_asked_for():
    torch.manual_seed(7)
    loader, job = DataLoader(Noisy(), 4), Job()
    batches = begin(job, loader)
    switch = Switch(ForkContinuation(), job)
    on(switch)
    next(batches)
    assert feed_of(batches).num_ahead == 2
    switch.close()
    next(batches), next(batches)
    next(batches)
    assert "_next_data" not in vars(batches)
    del batches


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.rand(40, 2))


class OwnNumbers(Rows):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.numbers.random(2)) + torch.rand(2)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda: DataLoader(Rows(), 4), "its samples are not random"),
        (lambda: DataLoader(Noisy(), 4, num_workers=1), "whose random numbers are their own"),
        (lambda: DataLoader(OwnNumbers(), 4), "making a batch changes the dataset itself"),
        (lambda: DataLoader(Stream(), 4), "IterableDataset"),
    ],
)
def test_what_it_cannot_go_on_with_is_refused(make, reason):
    job = Job()
    batches = begin(job, make())
    with pytest.raises(CannotApply, match=reason):
        ForkContinuation().check(job)
    del batches


def test_two_loaders_that_draw_in_turn_are_refused():
    job = Job()
    both = [begin(job, DataLoader(Noisy(), 4)) for _ in range(2)]
    with pytest.raises(CannotApply, match="several loaders"):
        ForkContinuation().check(job)
    del both
