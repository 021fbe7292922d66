"""A sampler of the user's own is asked ahead only if that can move no random number, nor lose an index."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from diagnose.actions import _loader_sampler
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.fork_continuation import ForkContinuation
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.core.job import Job
from tests.loops import Noisy, Rows, Switch, begin, children_end, equal, loop, on


class Endless(Sampler[list[int]]):
    """Shuffles anew when all have been drawn; how long that takes nobody can wait for."""

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            torch.rand(1)
            for number in range(1_000_000_000):
                yield [number % 37]


class Long(Sampler[list[int]]):
    """Draws once, after many batches, and holds a table at which one look takes long."""

    def __init__(self) -> None:
        self.table = [str(i) for i in range(200_000)]

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(1000):
            if number == 700:
                torch.rand(1)
            yield [number % 37]


class Calm(Sampler[list[int]]):
    """Many batches, and nothing else."""

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(20_000):
            yield [number % 37]


@pytest.mark.parametrize(
    ("action", "rows", "num_workers"),
    [(LoaderWorkers(), Rows(), 0), (LoaderPrefetch(), Rows(), 1), (ForkContinuation(), Noisy(), 0)],
)
@pytest.mark.parametrize(
    ("sampler", "reason"),
    [(Long(), r"draws from the process's random numbers \(torch\)"), (Endless(), "came to no end")],
)
def test_a_sampler_that_draws_now_and_then_is_not_asked_ahead(
    action: Action,
    rows: Rows,
    num_workers: int,
    sampler: Sampler[Any],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_loader_sampler, "PASS_S", 0.1)
    job = Job()
    begin(job, DataLoader(rows, num_workers=num_workers, batch_sampler=sampler))
    with pytest.raises(CannotApply, match=reason):
        action.check(job)
    job.iterators.clear()
    assert children_end()


class Held(Sampler[int]):
    """Goes on in an iterator that it holds, epoch after epoch."""

    def __init__(self, rows: Iterator[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.rows, 20)


@pytest.mark.parametrize(
    ("action", "rows", "num_workers"),
    [(LoaderWorkers(), Rows(), 0), (LoaderPrefetch(), Rows(), 1), (ForkContinuation(), Noisy(), 0)],
)
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: itertools.cycle(range(37)), "cycle"),
        (lambda: (number % 37 for number in range(1000)), "generator"),
        (lambda: itertools.islice(itertools.cycle(range(37)), 1000), "islice"),
    ],
)
def test_a_sampler_whose_place_is_in_an_iterator_is_not_asked_ahead(
    action: Action, rows: Rows, num_workers: int, make: Callable[[], Iterator[int]], kind: str
) -> None:
    job = Job()
    begin(job, DataLoader(rows, 4, num_workers=num_workers, sampler=Held(make())))
    with pytest.raises(CannotApply, match=rf"keeps its place in itself \({kind}\)"):
        action.check(job)
    job.iterators.clear()
    assert children_end()


class ItsOwnIterator(Sampler[list[int]]):
    """Begins anew with each epoch, and is the same object in all of them."""

    def __len__(self) -> int:
        return 18

    def __iter__(self) -> Iterator[list[int]]:
        self.left = iter([[2 * number, 2 * number + 1] for number in range(18)])
        return self

    def __next__(self) -> list[int]:
        return next(self.left)


@pytest.mark.parametrize(("action", "value"), [(LoaderWorkers(), 2), (LoaderPrefetch(), 4)])
@pytest.mark.parametrize("stop_at", [-1, 5])
def test_a_sampler_that_is_its_own_iterator_begins_anew_with_each_epoch(
    action: Action, value: int, stop_at: int
) -> None:
    make: Callable[[], DataLoader[Any]] = lambda: DataLoader(  # noqa: E731
        Rows(), batch_sampler=ItsOwnIterator(), num_workers=2, persistent_workers=True
    )
    ours = loop(make, action, {1: on(value)}, epochs=3, stop_at=stop_at)
    assert equal(ours, loop(make, epochs=3, stop_at=stop_at))
    assert children_end()


def test_a_long_sampler_that_draws_nothing_is_asked_ahead() -> None:
    job = Job()
    begin(job, DataLoader(Rows(), batch_sampler=Calm()))
    LoaderWorkers().check(job)


class Rare(Sampler[int]):
    """Draws in the middle of an epoch. No other sampler has its class."""

    def __len__(self) -> int:
        return 37

    def __iter__(self) -> Iterator[int]:
        yield from range(20)
        yield from (int(torch.randint(37, ())) for _ in range(17))


def test_a_sampler_that_nobody_has_followed_is_not_asked_ahead() -> None:
    """An evaluation reads the same rows in an order of its own."""

    def rows(switched: bool) -> list[Any]:
        torch.manual_seed(3)
        job, dataset, found = Job(), Rows(), []
        training = DataLoader(dataset, 4, shuffle=True)
        evaluation = DataLoader(dataset, 1, sampler=Rare())
        switch = Switch(LoaderWorkers(), job)
        for epoch in range(2):
            for number, batch in enumerate(begin(job, training)):
                found.append(batch.tolist())
                if switched and (epoch, number) == (0, 1):
                    switch.on(2)
            for batch in begin(job, evaluation):
                found += [batch.tolist(), torch.rand(1).item()]
        switch.close()
        return found

    assert rows(True) == rows(False)


class OneList(Sampler[list[int]]):
    """Yields the same list again and again, with other indices in it."""

    def __len__(self) -> int:
        return 18

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        for index in range(36):
            batch.append(index)
            if len(batch) == 2:
                yield batch
                batch.clear()


class OneTensor(OneList):
    """Likewise with a tensor."""

    def __iter__(self) -> Iterator[Any]:
        batch = torch.zeros(2, dtype=torch.int64)
        for index in range(len(self)):
            yield batch.copy_(torch.tensor([2 * index, 2 * index + 1]))


@pytest.mark.parametrize("sampler", [OneList, OneTensor])
def test_what_the_sampler_fills_anew_is_asked_for_as_it_was(sampler: type[OneList]) -> None:
    make: Callable[[], DataLoader[Any]] = lambda: DataLoader(Rows(), batch_sampler=sampler())  # noqa: E731
    assert equal(loop(make, LoaderWorkers(), {1: on(2)}), loop(make))
    assert children_end()
