"""What served a loader or a dataset goes with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.actions.base import Action
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.persistent_workers import PersistentWorkers
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, children_end, equal
from tests.test_actions_loader_cache import SecondEpoch


class Collated(Rows):
    """Rows that are collated by themselves."""

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples)


CASES: dict[str, tuple[Callable[[], Action], int | None, Callable[[], DataLoader[Any]]]] = {
    "workers": (LoaderWorkers, 2, lambda: DataLoader(Rows(), 4)),
    "workers for a method": (
        LoaderWorkers,
        2,
        lambda: DataLoader(rows := Collated(), 4, collate_fn=rows.collate),
    ),
    "workers beside workers": (LoaderWorkers, 2, lambda: DataLoader(Rows(), 4, num_workers=1)),
    "a deeper queue": (LoaderPrefetch, 4, lambda: DataLoader(Rows(), 4, num_workers=1)),
    "kept workers": (PersistentWorkers, None, lambda: DataLoader(Rows(), 4, num_workers=1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("num_left", [0, 3])
def test_a_loader_that_the_script_drops_goes_with_its_rows_and_workers(case: str, num_left: int) -> None:
    make, value, loads = CASES[case]
    job, loader = Job(), loads()
    rows = ref(loader.dataset)
    batches = begin(job, loader)
    switch = Switch(make(), job)
    switch.on(value)
    for _ in range(3):
        for _ in range(10 - num_left):
            next(batches)
        if not num_left:
            assert next(batches, None) is None
        batches = begin(job, loader)
    job.loaders.clear()
    job.iterators.clear()
    del loader, batches
    assert rows() is None
    assert children_end()
    switch.close()


def test_remembered_samples_go_with_their_dataset() -> None:
    job, loader = Job(), DataLoader(Rows(), 4)
    rows, batches = ref(loader.dataset), begin(job, loader)
    switch = Switch(SecondEpoch(), job)
    switch.on(None)
    list(batches)
    list(begin(job, loader))
    samples = switch.prepare(None).samples
    assert samples.are_all_known and samples._kept
    job.loaders.clear()
    job.iterators.clear()
    del loader, batches
    assert rows() is None and not samples._kept and samples.refused
    other = DataLoader(Rows(), 4)
    assert equal(list(begin(job, other)), other)
    switch.close()


def test_a_loader_has_its_workers_after_another_one_was_dropped() -> None:
    job, stays, goes = Job(), DataLoader(Rows(), 4), DataLoader(Rows(), 5)
    switch = Switch(LoaderWorkers(), job)
    for loader in (stays, goes):
        begin(job, loader)
    switch.on(2)
    job.loaders.pop()
    job.iterators.pop()
    del loader, goes
    assert equal(list(begin(job, stays)), DataLoader(Rows(), 4))
    switch.off()
    switch.on(2)
    assert equal(list(begin(job, stays)), DataLoader(Rows(), 4))
    switch.close()
    assert children_end()


def test_an_iterator_that_outlives_its_loader_has_its_workers_to_the_end() -> None:
    job, loader = Job(), DataLoader(Rows(), 4, num_workers=1)
    switch = Switch(PersistentWorkers(), job)
    list(begin(job, loader))
    switch.on(None)
    list(begin(job, loader))
    batches = begin(job, loader)
    found = [next(batches)]
    job.loaders.clear()
    job.iterators.clear()
    del loader
    found += list(batches)
    assert equal(found, DataLoader(Rows(), 4))
    assert children_end()
    switch.close()
    assert batches._shutdown
