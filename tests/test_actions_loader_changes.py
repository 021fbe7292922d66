"""Batches that our workers make are of what the script has changed between two epochs, or in a step."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.actions._loader_parts import Watch
from diagnose.actions.base import Action
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.persistent_workers import PersistentWorkers
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin
from tests.test_actions_loader_cache import SecondEpoch
from tests.test_actions_loader_exact import takes_a_shard

pytest_plugins = ("tests.loops",)
pytestmark = pytest.mark.usefixtures("no_child_is_left")


SIZES = {"add": 0.0}


def add_of_module(row: torch.Tensor) -> torch.Tensor:
    return row + SIZES["add"]


class Made(Rows):
    """Rows that are made from much that a script may change."""

    of_class = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.labels: list[float] = [0.0] * 500
        self.pairs = [("row", 0.0)] * 500
        self.by_name = {str(i): [0.0] for i in range(100)}
        self.array = np.zeros((300, 7))
        self.nested = [{"deep": [0.0]}]
        self.frame = pd.DataFrame({"shift": np.zeros(37), "name": [""] * 37})
        self.shared = multiprocessing.Array("d", 37)

    def __getitem__(self, index: int) -> torch.Tensor:
        row = add_of_module(super().__getitem__(index)) + Made.of_class + self.labels[index]
        row = row + self.pairs[index][1] + self.by_name[str(index)][0] + self.array[index, 3]
        row = row + float(self.frame["shift"].iloc[index]) + len(self.frame.loc[index, "name"])
        return row + self.nested[0]["deep"][0] + self.shared[index]


class Collating:
    def __init__(self) -> None:
        self.add = 0.0

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + self.add


Change = Callable[[Made, Collating, float], None]

CHANGES = (
    "SIZES['add'] = to",
    "Made.of_class = to",
    "collate.add = to",
    "dataset.labels[17] = to",
    "dataset.pairs[17] = ('row', to)",
    "dataset.by_name['17'][0] = to",
    "dataset.array[17, 3] = to",
    "dataset.nested[0]['deep'][0] = to",
    "dataset.frame.loc[17, 'shift'] = to",
    "dataset.frame['shift'] = np.full(37, to)",
    "dataset.frame.loc[17, 'name'] = 'x' * int(to)",
    "dataset.shared[17] = to",
)
"""What a script does between two epochs, or in a step."""


@pytest.fixture(params=CHANGES)
def change(request: pytest.FixtureRequest) -> Iterator[Change]:
    def change(dataset: Made, collate: Collating, to: float) -> None:
        exec(request.param, globals(), {"dataset": dataset, "collate": collate, "to": to})

    yield change
    SIZES["add"] = Made.of_class = 0.0


@pytest.mark.parametrize(
    ("action", "num_workers"),
    [
        (LoaderWorkers(), 0),
        pytest.param(LoaderWorkers(), 1, marks=pytest.mark.extended),
        (SecondEpoch(), 0),
        pytest.param(PersistentWorkers(), 1, marks=pytest.mark.extended),
    ],
    ids=["workers", "more workers", "cache", "kept"],
)
def test_what_the_script_changes_between_epochs_is_seen(
    action: Action, num_workers: int, change: Change
) -> None:
    def rows(switched: bool) -> list[Any]:
        job, dataset, collate, found = Job(), Made(), Collating(), []
        change(dataset, collate, 0.0)
        loader = DataLoader(dataset, 4, collate_fn=collate, num_workers=num_workers)
        switch = Switch(action, job)
        for epoch in range(5):
            if epoch > 2:
                change(dataset, collate, float(epoch))
            batches = begin(job, loader)
            if epoch == 1 and switched:
                switch.on(2 if isinstance(action, LoaderWorkers) else None)
            found += [batch.tolist() for batch in batches]
        switch.close()
        return found

    assert rows(True) == rows(False)


def test_what_the_script_changes_in_each_step_is_read_as_it_is(change: Change) -> None:
    def rows(switched: bool) -> list[Any]:
        job, dataset, collate, found = Job(), Made(), Collating(), []
        change(dataset, collate, 0.0)
        batches = begin(job, DataLoader(dataset, 4, collate_fn=collate))
        switch = Switch(LoaderWorkers(), job)
        for number, batch in enumerate(batches):
            found.append(batch.tolist())
            if switched and number == 0:
                switch.on(2)
            change(dataset, collate, float(number))
        switch.close()
        return found

    assert rows(True) == rows(False)


def test_what_nobody_changes_serves_on_without_being_made_anew() -> None:
    job, dataset, collate = Job(), Made(), Collating()
    loader = DataLoader(dataset, 4, collate_fn=collate, shuffle=True)
    batches = begin(job, loader)
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    (pool,) = switch.prepare(2)
    first = pool.workers
    for _ in range(4):
        list(batches)
        batches = begin(job, loader)
    assert pool.workers is first and not pool.broken
    switch.close()


def test_workers_begin_anew_where_the_script_sets_them_up_differently() -> None:
    job = Job()
    loader = DataLoader(Rows(), 4, num_workers=1, worker_init_fn=takes_a_shard)
    batches = begin(job, loader)
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    (pool,) = switch.prepare(2)
    first = pool.workers
    list(batches)
    list(begin(job, loader))
    assert pool.workers is first
    loader.worker_init_fn = None
    list(begin(job, loader))
    assert pool.workers is not first
    switch.close()


@pytest.mark.parametrize(
    "table",
    [
        list(range(2_000_000)),
        {i: (str(i), [i]) for i in range(300_000)},
        np.zeros((200, 1 << 20), np.uint8),
        [list(range(300)) for _ in range(20_000)],
        [b"x" * 1000] * 200_000,
    ],
    ids=["numbers", "tuples", "bytes", "lists", "texts"],
)
def test_a_look_at_a_long_table_takes_a_bounded_time(table: Any) -> None:
    watch = Watch(table)
    begun = time.process_time()
    assert not watch.has_changed()
    assert time.process_time() - begun < 1.0


class Shy:
    """Refuses to be looked at, as a proxy without its object does."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of application context")


def test_what_does_not_let_itself_be_looked_at_is_let_be() -> None:
    dataset = Made()
    dataset.shy = Shy()
    watch = Watch(dataset)
    assert not watch.has_changed_now()
    dataset.labels[0] = 1.0
    assert watch.has_changed()
