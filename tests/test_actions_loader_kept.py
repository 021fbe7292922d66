"""Workers that are kept from epoch to epoch make what new ones would have made."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from diagnose.actions import _loader_keep
from diagnose.actions._loader_parts import Watch
from diagnose.actions.base import CannotApply
from diagnose.actions.persistent_workers import PersistentWorkers
from diagnose.core.job import Job
from tests.loops import Noisy, Plan, Rows, Switch, begin, children_end, close, equal, loop, off, on
from tests.mixing import mixed

pytest_plugins = ("tests.loops",)
pytestmark = pytest.mark.usefixtures("no_child_is_left")


class Opening(Noisy):
    """Opens what it reads from with the first sample that a worker makes."""

    table: torch.Tensor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(13.0)
        return super().__getitem__(index) + self.table[index]


MAKES: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(Rows(13), 4, shuffle=True, num_workers=2),
    "random samples": lambda: DataLoader(Noisy(13), 4, shuffle=True, num_workers=2),
    "generator": lambda: DataLoader(
        Noisy(13), 3, shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(3)
    ),
    "no batches": lambda: DataLoader(Noisy(5), None, num_workers=1),
    "set up by each worker": lambda: DataLoader(Opening(13), 4, num_workers=2),
}
PLANS: dict[str, Plan] = {
    "on": {1: on(None)},
    "on and off": {1: on(None), 7: off, 9: on(None), 11: off, 12: on(None), 17: close},
    "at the end": {4: on(None), 9: off, 10: on(None), 14: off},
}


@pytest.mark.parametrize("make, plan", mixed(MAKES, PLANS))
@pytest.mark.parametrize("stop_at", [-1, pytest.param(2, marks=pytest.mark.extended)])
def test_samples_and_random_numbers_are_those_of_new_workers(
    make: Callable[[], DataLoader[Any]], plan: Plan, stop_at: int
) -> None:
    ours = loop(make, PersistentWorkers(), plan, epochs=5, stop_at=stop_at)
    assert equal(ours, loop(make, epochs=5, stop_at=stop_at))


class Whose(Rows):
    """Rows that tell which of the training process's workers made them."""

    level = 0
    trains = os.getpid()

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        is_probe = os.getppid() != self.trains
        return torch.tensor([0 if is_probe else os.getpid(), self.level])


def makers(batches: Any) -> set[int]:
    return {int(pid) for batch in batches for pid in batch[:, 0]}


def test_the_same_processes_serve_the_next_epoch_and_end_after_leaving() -> None:
    job, loader = Job(), DataLoader(Whose(), 4, num_workers=2)
    batches = begin(job, loader)
    switch = Switch(PersistentWorkers(), job)
    switch.on(None)
    unseen = makers(batches)
    first = makers(begin(job, loader))
    assert first.isdisjoint(unseen), "nobody knows what those were made from"
    kept = makers(begin(job, loader))
    assert kept == first
    switch.off()
    assert children_end(), "the epoch has ended, and its workers with it"
    batches = begin(job, loader)
    assert makers(batches).isdisjoint(first)
    switch.close()


def test_left_in_the_middle_of_an_epoch_it_goes_on_and_its_workers_end_with_it() -> None:
    job, loader = Job(), DataLoader(Whose(), 4, num_workers=2)
    switch = Switch(PersistentWorkers(), job)
    list(begin(job, loader))
    switch.on(None)
    batches = begin(job, loader)
    next(batches)
    switch.close()
    assert len(list(batches)) == 9
    assert "_shutdown_workers" not in vars(batches)
    job.iterators.clear()


@pytest.mark.parametrize("way", [copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_and_pickles_of_a_loader_are_the_scripts_own(way: Callable[[Any], Any]) -> None:
    job, loader = Job(), DataLoader(Rows(13), 4, num_workers=1)
    batches = begin(job, loader)
    switch = Switch(PersistentWorkers(), job)
    switch.on(None)
    list(batches)
    list(begin(job, loader))  # its workers are kept
    other = way(loader)
    other.dataset.num_rows = 5
    assert len(torch.cat(list(other))) == 5
    assert len(torch.cat(list(begin(job, loader)))) == 13
    switch.close()
    assert len(torch.cat(list(other))) == 5


def test_a_loader_that_makes_iterators_of_its_own_is_refused() -> None:
    class Mine(DataLoader[Any]):
        def _get_iterator(self) -> Any:
            return super()._get_iterator()

    job = Job()
    begin(job, Mine(Rows(), 4, num_workers=1))
    with pytest.raises(CannotApply, match="in a way of its own"):
        PersistentWorkers().check(job)
    job.iterators.clear()


def test_what_a_signal_handler_raises_when_an_epoch_begins_reaches_the_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rings(number: int, frame: object) -> None:
        raise TimeoutError("the script's own alarm")

    job, loader = Job(), DataLoader(Whose(), 4, num_workers=1)
    batches = begin(job, loader)
    switch = Switch(PersistentWorkers(), job)
    switch.on(None)
    list(batches)
    before = signal.signal(signal.SIGUSR1, rings)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Watch, "has_changed", lambda *_, **__: os.kill(os.getpid(), signal.SIGUSR1))
            with pytest.raises(TimeoutError, match="own alarm"):
                iter(loader)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(list(begin(job, loader))) == 10
    switch.close()


def test_a_dataset_that_the_script_has_changed_gets_new_workers() -> None:
    job, dataset = Job(), Whose()
    loader = DataLoader(dataset, 4, num_workers=1)
    batches = begin(job, loader)
    switch = Switch(PersistentWorkers(), job)
    switch.on(None)
    list(batches)
    first = makers(begin(job, loader))
    dataset.level = 3
    rows = torch.cat(list(begin(job, loader)))
    assert rows[:, 1].unique().tolist() == [3]
    assert int(rows[0, 0]) not in first
    switch.close()


shift = [0.0]


class Shifted(Rows):
    """Rows that are shifted by as much as their worker was told when it was set up."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + shift[0]


def by_one(worker_id: int) -> None:
    shift[0] = 1.0


def by_two(worker_id: int) -> None:
    shift[0] = 2.0


def doubled(samples: list[torch.Tensor]) -> torch.Tensor:
    return 2 * torch.stack(samples)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("collate_fn", torch.stack, doubled), ("worker_init_fn", by_one, by_two)],
)
def test_workers_call_the_function_that_the_script_has_put_in(
    name: str, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    def rows(switched: bool) -> list[Any]:
        job, found = Job(), []
        loader = DataLoader(Shifted(13), 4, num_workers=1, **{name: before})
        switch = Switch(PersistentWorkers(), job)
        for epoch in range(5):
            if epoch == 3:
                setattr(loader, name, after)
            batches = begin(job, loader)
            if switched and epoch == 0:
                switch.on(None)
            found += [batch.tolist() for batch in batches]
        switch.close()
        return found

    assert rows(True) == rows(False)


class Framed(Rows):
    """Rows that are shifted by a column."""

    def __init__(self) -> None:
        super().__init__()
        self.table = pd.DataFrame({"label": np.zeros(37), "name": "a"})

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.table.iloc[index]["label"]


def test_labels_that_are_written_into_a_frame_after_each_epoch_are_trained_on() -> None:
    def rows(switched: bool) -> list[Any]:
        job, dataset, found = Job(), Framed(), []
        loader = DataLoader(dataset, 4, num_workers=1)
        switch = Switch(PersistentWorkers(), job)
        for epoch in range(5):
            batches = begin(job, loader)
            if switched and epoch == 0:
                switch.on(None)
            found += [batch.tolist() for batch in batches]
            dataset.table.loc[[3, 30], "label"] = float(epoch)
        switch.close()
        return found

    assert rows(True) == rows(False)


def test_a_dataset_that_was_changed_while_it_was_off_gets_new_workers() -> None:
    """The epoch's own workers have it as it was when they began; those of the next must not."""
    job, dataset = Job(), Whose()
    loader = DataLoader(dataset, 4, num_workers=1)
    switch = Switch(PersistentWorkers(), job)
    begin(job, loader)
    switch.prepare(None)
    for epoch in range(3):
        batches = begin(job, loader)
        next(batches)
        dataset.level += 1
        switch.on(None)
        list(batches)
        rows = torch.cat(list(begin(job, loader)))
        assert rows[:, 1].unique().tolist() == [epoch + 1]
        switch.off()
    switch.close()


def test_an_epoch_begun_beside_another_gets_workers_of_its_own() -> None:
    job, loader = Job(), DataLoader(Whose(), 4, num_workers=1)
    switch = Switch(PersistentWorkers(), job)
    one = begin(job, loader)
    switch.on(None)
    other = begin(job, loader)
    rows = list(zip(one, other, strict=True))
    assert len(rows) == 10
    assert int(rows[0][0][0, 0]) != int(rows[0][1][0, 0])
    switch.close()


def test_the_end_of_an_epoch_is_the_scripts_even_if_torch_knows_nothing_of_its_workers() -> None:
    end = _loader_keep.End(key=12345)
    end()
    assert end.came


class Counting(Rows):
    calls = 0

    def __getitem__(self, index: int) -> torch.Tensor:
        self.calls += 1
        return super().__getitem__(index)


class Seeding(Rows):
    """Seeds NumPy's generator once in each worker, as scripts do that know of its old trap."""

    seeded = False

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.seeded:
            np.random.seed(torch.initial_seed() % 2**32)
            self.seeded = True
        return super().__getitem__(index) + float(np.random.rand() > 0.5)


class DrawnTable(Rows):
    """Draws a table once in each worker."""

    table: torch.Tensor | None = None

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.table is None:
            self.table = self.made()
        return super().__getitem__(index) + self.table[index]

    def made(self) -> torch.Tensor:
        return torch.rand(len(self))


class SeededTable(DrawnTable):
    """Draws it from a generator of its own, with the worker's seed."""

    def made(self) -> torch.Tensor:
        return torch.rand(len(self), generator=torch.Generator().manual_seed(torch.initial_seed()))


class Hidden(Rows):
    """Draws from a generator that nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: SimpleQueue[int] = SimpleQueue()
        self.drawn.put(0)

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = self.drawn.get()
        self.drawn.put(drawn + 1)
        return super().__getitem__(index) + drawn


class HiddenAndNoisy(Hidden):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1)


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (DataLoader(Rows(), 4), "has no workers"),
        (DataLoader(Rows(), 4, num_workers=1, persistent_workers=True), "keeps its workers already"),
        (DataLoader(Rows(401), 4, num_workers=1), "an epoch has 101 steps"),
        (DataLoader(Counting(), 4, num_workers=1), "changes the dataset itself: calls"),
        (DataLoader(Noisy(), 4, num_workers=1, worker_init_fn=print), "sets up each new worker"),
        (DataLoader(Seeding(), 4, num_workers=1), "kept makes another batch, seeded anew"),
        (DataLoader(DrawnTable(), 4, num_workers=1), "kept makes another batch, seeded anew"),
        (DataLoader(SeededTable(), 4, num_workers=1), "kept makes another batch, seeded anew"),
        (DataLoader(Hidden(), 4, num_workers=1), "kept makes another batch, seeded anew"),
        (DataLoader(HiddenAndNoisy(), 4, num_workers=1), "kept makes another batch, seeded anew"),
    ],
)
def test_what_kept_workers_would_change_is_refused(
    loader: DataLoader[Any], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    begin(job, loader)
    with pytest.raises(CannotApply, match=reason):
        PersistentWorkers().check(job)
    job.iterators.clear()
    if loader.persistent_workers:
        loader._iterator = None  # torch keeps it otherwise
