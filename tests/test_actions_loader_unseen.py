"""What batches are made from and cannot be seen to change, and what is seen although it is compiled."""

from __future__ import annotations

import abc
import ctypes
import datetime
import enum
import functools
import multiprocessing
import random
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.managers import Token
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.actions import _loader_samples, persistent_workers
from diagnose.actions._loader_contents import MANY_BYTES, MAX_BYTES
from diagnose.actions._loader_parts import Watch
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.persistent_workers import PersistentWorkers
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin
from tests.test_actions_loader_cache import SecondEpoch

pytest_plugins = ("tests.loops",)
pytestmark = pytest.mark.usefixtures("no_child_is_left")


Compiled: Any = type("PyDataFrame", (), {"__slots__": ("shift",), "__module__": "builtins"})
"""A class as compilers make it from Rust: nobody sees what its objects hold."""


def compiled(shift: float = 0.0) -> Any:
    table = Compiled()
    table.shift = shift
    return table


class Sealed(Rows):
    """Rows that are shifted by what nobody sees."""

    def __init__(self) -> None:
        super().__init__()
        self.table = compiled()

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.table.shift

    def write(self, to: float) -> None:
        self.table.shift = to


class Large(Rows):
    """Rows that are shifted by an element that is not among those that are looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.table = np.zeros(MAX_BYTES + (8 << 20), np.uint8)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(self.table[5000])

    def write(self, to: float) -> None:
        self.table[5000] = int(to)


@pytest.mark.parametrize("dataset", [Sealed, Large])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_workers_that_are_ours_get_it_with_each_epoch(dataset: type[Any], num_workers: int) -> None:
    def rows(switched: bool) -> list[Any]:
        job, data, found = Job(), dataset(), []
        loader = DataLoader(data, 4, num_workers=num_workers)
        switch = Switch(LoaderWorkers(), job)
        for epoch in range(4):
            data.write(float(epoch))
            batches = begin(job, loader)
            if switched and epoch == 0:
                switch.on(2)
            found += [batch.tolist() for batch in batches]
        if switched:
            assert not switch.prepare(2)[0].refused
        switch.close()
        return found

    assert rows(True) == rows(False)


def test_in_the_middle_of_an_epoch_batches_are_compared_now_and_then() -> None:
    job, data = Job(), Sealed()
    batches = begin(job, DataLoader(data, 4))
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    (pool,) = switch.prepare(2)
    for _ in range(3):
        next(batches)
    assert pool.proven and not pool.refused
    data.write(1.0)
    pool._proven_at -= 1000.0
    rows = torch.cat(list(batches))
    assert rows[:, 0].tolist() == [index + 1.0 for index in range(12, 37)]
    assert "differs" in pool.refused
    switch.close()


@pytest.mark.parametrize(
    ("action", "num_workers"), [(SecondEpoch(), 0), (PersistentWorkers(), 1)], ids=["cache", "kept"]
)
@pytest.mark.parametrize("dataset", [Sealed, Large])
def test_what_is_kept_from_epoch_to_epoch_is_refused(
    dataset: type[Any], action: Action, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_loader_samples, persistent_workers):
        monkeypatch.setattr(module, "MANY_BYTES", MAX_BYTES)
    job = Job()
    begin(job, DataLoader(dataset(), 4, num_workers=num_workers))
    with pytest.raises(CannotApply, match=r"could see whether the script changes .*table \((PyData|nd)"):
        action.check(job)
    job.iterators.clear()


@pytest.mark.parametrize(
    ("action", "num_workers"), [(SecondEpoch(), 0), (PersistentWorkers(), 1)], ids=["cache", "kept"]
)
def test_of_a_table_that_is_not_too_large_all_is_seen(action: Action, num_workers: int) -> None:
    def rows(switched: bool) -> list[Any]:
        job, data, found = Job(), Large(), []
        loader = DataLoader(data, 20, num_workers=num_workers)
        switch = Switch(action, job)
        for epoch in range(5):
            data.write(float(epoch // 3))
            batches = begin(job, loader)
            if switched and epoch == 1:
                switch.on(None)
            found += [batch.tolist() for batch in batches]
        switch.close()
        return found

    assert rows(True) == rows(False)


def test_what_comes_to_be_unseen_later_is_not_kept() -> None:
    job, data = Job(), Rows()
    loader = DataLoader(data, 4)
    batches = begin(job, loader)
    switch = Switch(SecondEpoch(), job)
    switch.on(None)
    list(batches)
    samples = switch.prepare(None).samples
    assert not samples.refused
    data.table = compiled()  # type: ignore[attr-defined]
    list(begin(job, loader))
    assert "table (PyDataFrame)" in samples.refused
    switch.close()


# -- what can be seen


class Settings(dict[str, Any]):
    """A dictionary with attributes, as packages for settings have it."""


@dataclass(slots=True)
class Slotted:
    label: float = 0.0


def frames() -> Any:
    return pd.DataFrame({"label": np.zeros(50), "name": ["a"] * 50, "at": pd.Timestamp("2020-01-01")})


SEEN: dict[str, tuple[Callable[[], Any], str]] = {
    "a DataFrame": (frames, "table.loc[17, 'label'] = 1.0"),
    "a new column": (frames, "table['weight'] = 1.0"),
    "another column": (frames, "table['label'] = np.zeros(50)"),
    "a column of text": (frames, "table.loc[17, 'name'] = 'b'"),
    "a column of times": (frames, "table.loc[17, 'at'] = pd.Timestamp('2021-01-01')"),
    "a DataFrame of few types": (
        lambda: pd.DataFrame(np.zeros((50, 3)), columns=["label", "b", "c"]),
        "table.loc[17, 'label'] = 1.0",
    ),
    "a Series": (lambda: pd.Series(np.zeros(50)), "table[17] = 1"),
    "categories": (lambda: pd.Categorical([1, 2] * 20), "table[17] = 1"),
    "missing values": (lambda: pd.array([0, 2] * 20, dtype="Int64"), "table[17] = 1"),
    "many DataFrames": (lambda: [frames() for _ in range(40)], "table[0].loc[17, 'label'] = 1.0"),
    "ctypes": (lambda: (ctypes.c_int * 40)(), "table[17] = 1"),
    "a value of multiprocessing": (lambda: multiprocessing.Value("d", 0.0), "table.value = 1.0"),
    "an array of multiprocessing": (lambda: multiprocessing.Array("i", 40), "table[17] = 1"),
    "shared memory": (lambda: memoryview(bytearray(40)), "table[17] = 1"),
    "many arrays": (lambda: [np.zeros(1000) for _ in range(40)], "table[17][900] = 1.0"),
    "an array that lies otherwise": (lambda: np.zeros((50, 40)).T, "table[17, 3] = 1.0"),
    "many settings": (lambda: [Settings() for _ in range(40)], "table[17]['label'] = 1.0"),
    "many objects with slots": (lambda: [Slotted() for _ in range(40)], "table[17].label = 1.0"),
    "few objects with slots": (lambda: [Slotted() for _ in range(20)], "table[17].label = 1.0"),
}


@pytest.mark.parametrize(("make", "write"), SEEN.values(), ids=SEEN)
def test_what_is_written_in_place_is_seen(make: Callable[[], Any], write: str) -> None:
    dataset = Rows()
    dataset.table = make()  # type: ignore[attr-defined]
    watch = Watch(dataset)
    assert not watch.unseen
    assert not watch.has_changed()
    exec(write, globals(), {"table": dataset.table})  # type: ignore[attr-defined]
    assert watch.has_changed()


def test_reading_a_frame_does_not_change_it() -> None:
    dataset = Rows()
    dataset.table = table = frames()  # type: ignore[attr-defined]
    dataset.by_name = table.set_index("name")  # type: ignore[attr-defined]
    dataset.names = table["name"]  # type: ignore[attr-defined]
    watch = Watch(dataset)
    for _ in range(2):
        table.iloc[3], table["label"].iloc[4], table.loc[5], table.at[6, "name"], len(table), table.values
        table.label, dataset.names[7], dataset.by_name.loc["a"], list(table.itertuples())
    assert not watch.has_changed()


class Kind(enum.Enum):
    ONE = 1


class Abstract(abc.ABC):
    @abc.abstractmethod
    def read(self) -> None: ...


class Concrete(Abstract):
    def read(self) -> None: ...


HARMLESS: dict[str, Callable[[], Any]] = {
    "samples of folders": lambda: [(f"{i}.png", i % 10) for i in range(60_000)],
    "files": lambda: [Path(str(i)) for i in range(30_000)],
    "labels": lambda: [i % 10 for i in range(900_000)],
    "boxes": lambda: {i: [0.0, 1.0, 2.0, 3.0] for i in range(1000)},
    "an expression": lambda: re.compile("a"),
    "a path": lambda: Path("a"),
    "a time": lambda: (datetime.datetime(2020, 1, 1), pd.Timestamp("2020-01-01"), np.datetime64("2020")),
    "generators": lambda: (np.random.default_rng(0), torch.Generator(), random.Random(0)),
    "functions": lambda: (
        functools.partial(print, 1),
        len,
        [].append,
        lambda: None,
        functools.lru_cache(len),
    ),
    "a kind": lambda: Kind.ONE,
    "of an abstract class": Concrete,
    "types": lambda: (torch.float32, torch.device("cpu"), np.dtype("f4"), torch.Size([1]), int, range(3)),
    "a lock": threading.Lock,
    "numbers of NumPy": lambda: [np.float32(i) for i in range(50)],
    "a slotted object": Slotted,
    "an index": lambda: frames().index,
}


@pytest.mark.parametrize("make", HARMLESS.values(), ids=HARMLESS)
def test_what_nobody_changes_unseen_is_not_taken_for_it(make: Callable[[], Any]) -> None:
    dataset = Rows()
    dataset.table = make()  # type: ignore[attr-defined]
    watch = Watch(dataset, most_bytes=MANY_BYTES)
    assert watch.unseen == ""
    assert not watch.has_changed()


HIDDEN: dict[str, Callable[[], Any]] = {
    "a compiled table": compiled,
    "many of them": lambda: [compiled() for _ in range(50)],
    "one among many": lambda: {i: [compiled() if i == 17 else i] for i in range(50)},
    "what stands for another process": lambda: Token("dict", "/tmp/listener", "1"),
    "a large array": lambda: np.zeros(MAX_BYTES + 8192, np.uint8),
    "many labels": lambda: [0] * 1_100_000,
    "many boxes": lambda: [[0.0, 1.0] for _ in range(30_000)],
    "something deep": lambda: [[[[[[0.0]]]]]] * 50,
}


@pytest.mark.parametrize("make", HIDDEN.values(), ids=HIDDEN)
def test_what_may_change_unseen_is_named(make: Callable[[], Any]) -> None:
    dataset = Rows()
    dataset.table = make()  # type: ignore[attr-defined]
    watch = Watch(dataset)
    assert watch.unseen == f"table ({type(dataset.table).__qualname__})"  # type: ignore[attr-defined]
