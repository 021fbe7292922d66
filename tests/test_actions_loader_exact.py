"""What samples draw from, samplers do and connections hold while workers make batches is the script's."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, Sampler, get_worker_info

from diagnose.actions.base import Action, CannotApply
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, equal, loop, on
from tests.test_actions_loader_checks import RandomPairs

pytest_plugins = ("tests.loops",)
pytestmark = pytest.mark.usefixtures("no_child_is_left")


# -- what a sample is made from besides its index


class OfWorker(Rows):
    """Rows with a number that depends on the worker that makes them."""

    def __init__(self, number: Callable[[], int]) -> None:
        super().__init__()
        self.number = number

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = np.random.default_rng(self.number() + index).random()
        return super().__getitem__(index) + noise


def seed_of_worker() -> int:
    info = get_worker_info()
    assert info is not None
    return info.seed


def number_of_worker() -> int:
    info = get_worker_info()
    return 99 if info is None else info.id


@pytest.mark.parametrize(
    ("number", "num_workers"),
    [(seed_of_worker, 2), (torch.initial_seed, 2), (number_of_worker, 2), (number_of_worker, 0)],
)
def test_samples_that_depend_on_who_makes_them_are_refused(
    number: Callable[[], int], num_workers: int
) -> None:
    job = Job()
    begin(job, DataLoader(OfWorker(number), 4, num_workers=num_workers))
    with pytest.raises(CannotApply, match="another worker, or none, makes another batch"):
        LoaderWorkers().check(job)
    job.iterators.clear()


shards: list[int] = []


def takes_a_shard(worker_id: int) -> None:
    assert not shards, "a worker begins once"
    shards.append(worker_id)


class Sharded(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + shards[0]


@pytest.mark.parametrize("rows", [Sharded, Rows])
def test_what_a_worker_sets_up_for_itself_counts_and_is_set_up_once(rows: type[Rows]) -> None:
    job = Job()
    begin(job, DataLoader(rows(), 4, num_workers=2, worker_init_fn=takes_a_shard))
    if rows is Rows:
        LoaderWorkers().check(job)
    else:
        with pytest.raises(CannotApply, match="another worker, or none"):
            LoaderWorkers().check(job)
    job.iterators.clear()


class Fooling(Rows):
    """Rows that are others in workers that begin later than the script's own, as nobody can foresee."""

    late = False

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + (10.0 if os.environ.get("LATE") else 0.0)


def test_batches_of_ours_are_compared_with_those_of_the_script_s_own_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rows(switched: bool) -> list[Any]:
        monkeypatch.delenv("LATE", raising=False)
        job = Job()
        batches = begin(job, DataLoader(Fooling(), 4, num_workers=1))
        switch = Switch(LoaderWorkers(), job)
        with closing(switch):
            found = [next(batches).tolist()]
            if switched:
                switch.prepare(2)
                monkeypatch.setenv("LATE", "1")
                (pool,) = switch.prepare(2)
                pool.workers.stop()
                pool.workers = pool._start(job.loaders[0], batches)
                switch.on(2)
            for batch in batches:
                found.append(batch.tolist())
                if switched and not pool.refused:
                    time.sleep(0.2)  # a batch is compared only if our worker's is there by then
            if switched:
                assert "differs from the one that the script makes" in pool.refused, pool.broken
        return found

    assert rows(True) == rows(False)


class Clips(Rows):
    """Samples of four axes, which lie in memory as a video decoder writes them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2, 3, 4, 4), float(index)).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_lie_in_memory_as_the_script_s_own_do(num_workers: int) -> None:
    """torch collates another layout in a worker than in the training process."""
    job = Job()
    begin(job, DataLoader(Clips(), 4, num_workers=num_workers))
    if num_workers:
        LoaderWorkers().check(job)
    else:
        with pytest.raises(CannotApply, match="another worker, or none, makes another batch"):
            LoaderWorkers().check(job)
    job.iterators.clear()


# -- samplers


class Resumable(Sampler[int]):
    """Goes on where it was left, epoch after epoch."""

    def __init__(self) -> None:
        self.place = 0

    def __len__(self) -> int:
        return 1000

    def __iter__(self) -> Iterator[int]:
        while True:
            yield self.place % 37
            self.place += 1


@pytest.mark.parametrize(
    ("action", "num_workers"), [(LoaderWorkers(), 0), (LoaderWorkers(), 1), (LoaderPrefetch(), 1)]
)
@pytest.mark.parametrize("sampler", [Resumable, RandomPairs])
def test_a_sampler_that_must_not_be_asked_ahead_is_refused(
    action: Action, num_workers: int, sampler: Any
) -> None:
    job, asked = Job(), sampler()
    kind = {"batch_sampler": asked} if sampler is RandomPairs else {"sampler": asked, "batch_size": 4}
    begin(job, DataLoader(Rows(), num_workers=num_workers, **kind))
    with pytest.raises(CannotApply, match=r"keeps its place in itself \(sampler.place\)|sampler draws"):
        action.check(job)
    job.iterators.clear()


class TurnsAtTheEnd(Sampler[int]):
    """Counts its epochs when the last index was taken, as accelerate's does."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return 37

    def __iter__(self) -> Iterator[int]:
        yield from random.Random(self.epoch).sample(range(37), 37)
        self.epoch += 1


@pytest.mark.parametrize("stop_at", [-1, 8])
def test_a_sampler_that_turns_with_its_last_index_turns_when_it_would_have(stop_at: int) -> None:
    make = lambda: DataLoader(Rows(), 4, sampler=TurnsAtTheEnd())  # noqa: E731
    ours = loop(make, LoaderWorkers(), {2: on(3)}, epochs=4, stop_at=stop_at)
    assert equal(ours, loop(make, epochs=4, stop_at=stop_at))


class Steered(Sampler[list[int]]):
    """Takes its next batch from where the loop says."""

    def __init__(self) -> None:
        self.first = 0

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            yield [self.first, self.first + 1]


class DrawsItself(Sampler[list[int]]):
    """Draws each batch from a generator that it was given."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(4)

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(12):
            yield torch.randint(37, (2,), generator=self.generator).tolist()


@pytest.mark.parametrize("sampler", [Steered, DrawsItself])
def test_a_sampler_that_the_loop_moves_is_not_asked_ahead(sampler: Any) -> None:
    def rows(switched: bool) -> list[Any]:
        job, found, asked = Job(), [], sampler()
        switch = Switch(LoaderWorkers(), job)
        loader = DataLoader(Rows(), batch_sampler=asked)
        for epoch in range(2):
            for number, batch in enumerate(begin(job, loader)):
                found.append(batch.tolist())
                if switched and (epoch, number) == (0, 1):
                    switch.on(2)
                if sampler is Steered:
                    asked.first = number
                else:
                    found.append(torch.rand(1, generator=asked.generator).item())
        switch.close()
        return found

    assert rows(True) == rows(False)


@pytest.mark.parametrize("num_samples", [37, 100])
def test_a_generator_that_the_loop_draws_from_keeps_its_draws(num_samples: int) -> None:
    """Of more samples than there are rows, torch shuffles again in the middle of an epoch."""

    def rows(switched: bool) -> list[Any]:
        job, found = Job(), []
        shared = torch.Generator().manual_seed(5)
        switch = Switch(LoaderWorkers(), job)
        sampler = RandomSampler(Rows(), num_samples=num_samples, generator=shared)
        loader = DataLoader(Rows(), 4, sampler=sampler, generator=shared)
        for epoch in range(3):
            for number, batch in enumerate(begin(job, loader)):
                found += [batch.tolist(), torch.rand(1, generator=shared).item()]
                if switched and (epoch, number) == (0, 1):
                    switch.on(2)
        switch.close()
        return found

    assert rows(True) == rows(False)


# -- connections


class Asking(Rows):
    """Rows that come from a server, which must be asked by one process only.

    Args:
        first: The first row that the server has; others need no asking.
    """

    def __init__(self, server: socket.socket, first: int) -> None:
        super().__init__()
        self.server, self.first = server, first

    def __getitem__(self, index: int) -> torch.Tensor:
        row = super().__getitem__(index)
        if index >= self.first:
            self.server.sendall(f"{os.getpid():08d}".encode())
            row = row + float(self.server.recv(8))
        return row


@pytest.mark.parametrize("first", [0, 20])
def test_no_forked_process_speaks_on_a_connection_of_the_script_s(first: int) -> None:
    ours, theirs = socket.socketpair()
    asked_by = []

    def answer() -> None:
        while question := theirs.recv(8):
            asked_by.append(int(question))
            theirs.sendall(b"00000005")

    server = threading.Thread(target=answer, daemon=True)
    server.start()
    job, dataset = Job(), Asking(ours, first)
    batches = begin(job, DataLoader(dataset, 4))
    found = [next(batches)]
    switch = Switch(LoaderWorkers(), job)
    if first:
        switch.on(2)
    else:
        with pytest.raises(CannotApply, match="no batch could be made in a forked process"):
            switch.on(2)
    found += list(batches)
    switch.close()
    alone = [row + 5.0 if row[0] >= first else row for row in (Rows()[i] for i in range(37))]
    assert torch.equal(torch.cat(found), torch.stack(alone))
    assert set(asked_by) == {os.getpid()}
    ours.close()
    server.join(5)
    theirs.close()
