"""A loop over a `DataLoader` as a script writes it, whose input actions are switched between two steps."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from diagnose.actions.base import Action
from diagnose.core.job import Job
from tests.running import comes_true


class Rows(Dataset[torch.Tensor]):
    """Rows that tell their index, and that are made anew each time."""

    def __init__(self, num_rows: int = 37, *, sleep_ms: float = 0.0) -> None:
        self.num_rows, self.sleep_ms = num_rows, sleep_ms

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_ms / 1000)
        return torch.tensor([float(index), index * 0.1])


class Log:
    """What a dataset says without being changed by it: nobody looks into a queue."""

    def __init__(self) -> None:
        self._said: SimpleQueue[int] = SimpleQueue()

    def say(self, index: int) -> None:
        self._said.put(index)

    def heard(self) -> list[int]:
        """Returns what was said since the last time."""
        return [self._said.get() for _ in range(self._said.qsize())]


class Switch:
    """Puts an action in force with one setting after the other, as the tuner does.

    Args:
        action: The action.
        job: The job.
    """

    def __init__(self, action: Action, job: Job) -> None:
        self.action, self.job = action, job
        self.before = action.state(job)
        self._prepared: dict[int | None, Any] = {}
        self._preparing = ExitStack()
        self._applying = ExitStack()

    def prepare(self, value: int | None) -> Any:
        """Returns what is prepared for a setting."""
        if value not in self._prepared:
            self.action.check(self.job)
            context = self.action.prepare(self.job, value)
            self._prepared[value] = self._preparing.enter_context(context)
        return self._prepared[value]

    def on(self, value: int | None) -> None:
        """Puts the action in force, instead of an earlier setting."""
        prepared = self.prepare(value)
        self.off()
        self._applying.enter_context(self.action.apply(self.job, prepared))

    def off(self) -> None:
        """Takes it back."""
        self._applying.close()

    def close(self) -> None:
        """Takes it out."""
        self.off()
        self._prepared.clear()
        self._preparing.close()
        self.action.verify_undone(self.job, self.before)


Plan = Mapping[int, Callable[[Switch], None]]
"""What to do before a batch is asked for, by the number of batches asked for before it."""


def on(value: int | None) -> Callable[[Switch], None]:
    """Returns what puts a setting in force."""
    return lambda switch: switch.on(value)


def off(switch: Switch) -> None:
    """Takes the action back."""
    switch.off()


def close(switch: Switch) -> None:
    """Takes it out."""
    switch.close()


def begin(job: Job, loader: Any) -> Any:
    """Begins to iterate over a loader, as the hooks see it."""
    batches = iter(loader)
    for index in reversed(range(len(job.loaders))):
        if job.loaders[index] is loader:
            del job.loaders[index], job.iterators[index]
    job.loaders.append(loader)
    job.iterators.append(batches)
    for begins in list(job.on_iterator):
        begins(loader, batches)
    return batches


def loop(
    make: Callable[[], DataLoader[Any]],
    action: Action | None = None,
    plan: Plan | None = None,
    *,
    epochs: int = 2,
    stop_at: int = -1,
) -> Iterator[Any]:
    """Iterates over a loader, and draws a random number for each batch; yields both, and in the
    end the states of the generator and of the loader's own.

    Args:
        make: Makes the loader.
        action: What to switch; `None` leaves the loop alone.
        plan: When.
        epochs: How often to iterate.
        stop_at: Leave each epoch after so many batches.
    """
    torch.manual_seed(7)
    loader = make()
    job = Job()
    switch = Switch(action, job) if action else None
    asked = 0
    try:
        for _ in range(epochs):
            batches = begin(job, loader)
            for number in range(1000):
                if switch is not None and plan is not None and asked in plan:
                    plan[asked](switch)
                asked += 1
                if number == stop_at:
                    break
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                yield batch
                yield torch.rand(1)
            del batches
    finally:
        if switch is not None:
            switch.close()
    yield torch.get_rng_state()
    if loader.generator is not None:
        yield loader.generator.get_state()


def equal(one: Any, other: Any) -> bool:
    """Whether two loops yielded the same."""
    left, right = list(one), list(other)
    return len(left) == len(right) and all(map(torch.equal, left, right))


def children_end() -> bool:
    """Whether all child processes end in time, and leave no zombie."""
    return comes_true(lambda: not multiprocessing.active_children())


@pytest.fixture
def no_child_is_left() -> Iterator[None]:
    yield
    assert children_end(), multiprocessing.active_children()


class Noisy(Rows):
    """Rows with a random number of each of the process's generators."""

    def __getitem__(self, index: int) -> torch.Tensor:
        noise = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        return torch.cat([super().__getitem__(index), torch.tensor(noise)])
