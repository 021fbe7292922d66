"""What workers of ours refuse to serve, in words; and a loop under the hooks that they do serve."""

from __future__ import annotations

import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler

from diagnose.actions import _loader_choice
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.loader_workers_reseeded import LoaderWorkersReseeded
from diagnose.core.job import Job
from tests.loops import Rows, begin, children_end
from tests.toggled import assert_equal, tuned, weights


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


class Noisy(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + torch.rand(1)


class OwnNoise(Rows):
    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(self.generator.random())


class Unseeded(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + random.SystemRandom().random()


class Caching(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> torch.Tensor:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


class Reading(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self.file.write(bytes(range(200)))

    def __getitem__(self, index: int) -> torch.Tensor:
        self.file.seek(index)
        return torch.tensor([float(self.file.read(1)[0])])


class Querying(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.connection = sqlite3.connect(":memory:")


class Rotten(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise OSError(f"no row {index}")


class Odd(Rows):
    """Rows that cannot be sent to another process."""

    def __getitem__(self, index: int) -> Any:
        return lambda: index


class Kept(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(37.0)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.table[index]


class Records(Rows):
    """Records that are held, as a table read from a file is."""

    def __init__(self) -> None:
        super().__init__()
        self.records = [{"row": index, "hard": False} for index in range(37)]

    def __getitem__(self, index: int) -> Any:
        return self.records[index]


class Arrays(Rows):
    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros((37, 2))

    def __getitem__(self, index: int) -> Any:
        return self.table[index]


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


class Split(Enum):
    TRAIN = "train"


class Fresh(Records):
    """Records that are made anew each time, of what nobody can write to."""

    sizes = (3, 4)
    table = np.zeros(3)
    table.setflags(write=False)

    def __getitem__(self, index: int) -> Any:
        record = dict(super().__getitem__(index), array=np.ones(2), tensor=torch.ones(2))
        return record | {"sizes": self.sizes, "table": self.table, "split": Split.TRAIN, "made by": Fresh}


class RandomPairs(Sampler[list[int]]):
    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(5):
            yield torch.randint(37, (2,)).tolist()


REFUSED: dict[str, tuple[Callable[[], DataLoader[Any]], str]] = {
    "a stream": (lambda: DataLoader(Stream(), 2), "IterableDataset yields its samples again"),
    "random samples": (lambda: DataLoader(Noisy(), 4), r"samples are random \(torch\)"),
    "random samples of workers": (lambda: DataLoader(Noisy(), 4, num_workers=1), "samples are random"),
    "python's generator": (lambda: DataLoader(OwnNoise(random), 4), r"samples are random \(random\)"),
    "numpy's generator": (lambda: DataLoader(OwnNoise(np.random), 4), r"random \(numpy.random\)"),
    "its own generator": (lambda: DataLoader(OwnNoise(random.Random(1)), 4), "itself: generator"),
    "numpy's new generator": (
        lambda: DataLoader(OwnNoise(np.random.default_rng(1)), 4),
        "itself: generator",
    ),
    "unseeded noise": (lambda: DataLoader(Unseeded(), 4), "same indices gave two different batches"),
    "a cache of its own": (lambda: DataLoader(Caching(), 4, shuffle=True), "the dataset itself: cache"),
    "an open file": (lambda: DataLoader(Reading(), 4), "file that stays open"),
    "a database": (lambda: DataLoader(Querying(), 4), "sqlite3.Connection"),
    "rotten rows": (lambda: DataLoader(Rotten(), 4), "OSError: no row"),
    "functions": (lambda: DataLoader(Odd(), None), "no batch could be made in a forked process"),
    "its own memory": (lambda: DataLoader(Kept(), None), "the dataset's own memory"),
    "its own records": (
        lambda: DataLoader(Records(), 4, collate_fn=as_they_are),
        "the dataset's own memory",
    ),
    "its own arrays": (
        lambda: DataLoader(Arrays(), 4, collate_fn=as_they_are),
        "the dataset's own memory",
    ),
    "tensors of its own arrays": (lambda: DataLoader(Arrays(), None), "the dataset's own memory"),
    "a random sampler": (lambda: DataLoader(Rows(), batch_sampler=RandomPairs()), "the sampler draws"),
    "any order": (lambda: DataLoader(Rows(), 4, num_workers=1, in_order=False), "in any order"),
    "spawn": (
        lambda: DataLoader(Rows(), 4, num_workers=1, multiprocessing_context="spawn"),
        "started by spawn",
    ),
}


@pytest.mark.parametrize(("make", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_workers_would_change_is_refused(make: Callable[[], DataLoader[Any]], reason: str) -> None:
    job = Job()
    torch.manual_seed(0)
    if "spawn" in reason:
        job.loaders.append(make())
        job.iterators.append(iter(DataLoader(Rows(), 4)))  # starting spawned workers takes seconds
    else:
        begin(job, make())
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(CannotApply, match=reason):
        LoaderWorkers().check(job)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    job.iterators.clear()
    assert children_end()


@pytest.mark.parametrize(("rows", "num_workers"), [(Fresh, 0), (Records, 1), (Arrays, 1)])
def test_batches_into_which_the_loop_can_write_alone_are_served(
    rows: Callable[[], Rows], num_workers: int
) -> None:
    """What workers of the script's send are copies already."""
    job = Job()
    begin(job, DataLoader(rows(), 4, num_workers=num_workers, collate_fn=as_they_are))
    LoaderWorkers().check(job)
    job.iterators.clear()
    assert children_end()


def test_looking_moves_no_open_file() -> None:
    job, dataset = Job(), Reading()
    begin(job, DataLoader(dataset, 4))
    dataset.file.seek(11)
    with pytest.raises(CannotApply):
        LoaderWorkers().check(job)
    assert dataset.file.tell() == 11


def test_a_loader_that_can_be_served_is_served_beside_one_that_cannot() -> None:
    job = Job()
    begin(job, DataLoader(Stream(), 2))
    begin(job, DataLoader(Rows(), 4))
    begin(job, DataLoader(Noisy(), 4))
    assert [source.loader.batch_size for source in _loader_choice.sources(job)] == [4]
    assert len(_loader_choice.sources(job, reseeded=True)) == 2


@pytest.mark.parametrize("action", [LoaderWorkers(), LoaderWorkersReseeded(), LoaderPrefetch()])
def test_a_job_without_a_loader_is_refused(action: Action) -> None:
    with pytest.raises(CannotApply, match=r"no DataLoader feeds|no workers make"):
        action.check(Job())


def learn(action: Action | None, value: int, num_workers: int) -> tuple[list[torch.Tensor], list[float]]:
    """A script's loop, under the hooks if an action is switched in it."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    with tuned(action, value=value):
        losses = []
        loader = DataLoader(Rows(61), batch_size=4, shuffle=True, num_workers=num_workers)
        for _ in range(3):
            for batch in loader:
                optimizer.zero_grad()
                loss = model(batch).pow(2).mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
    return weights(model), losses


@pytest.mark.extended
@pytest.mark.parametrize(
    ("action", "value", "num_workers"),
    [(LoaderWorkers(), 2, 0), (LoaderWorkers(), 1, 2), (LoaderPrefetch(), 8, 2)],
    ids=["none to two", "two to one", "a longer queue"],
)
def test_a_loop_under_the_hooks_ends_with_the_same_weights(
    action: Action, value: int, num_workers: int
) -> None:
    ours, alone = learn(action, value, num_workers), learn(None, value, num_workers)
    assert_equal(ours[0], alone[0])
    assert ours[1] == alone[1]
    assert children_end()
