"""Workers that die, hang, raise or differ cost no sample."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from diagnose.actions import _loader_pool, _loader_service
from diagnose.actions._loader_order import Order
from diagnose.actions._loader_pool import Pool
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, equal, loop, off, on

pytest_plugins = ("tests.loops",)
pytestmark = pytest.mark.usefixtures("no_child_is_left")

HERE = os.getpid()


class Faulty(Rows):
    """Rows that something happens to at index 20: in a worker, or in the training process, or in both.

    Args:
        fault: Called with the index; returns what is added to the row.
        here: Whether it happens in the training process, too.
    """

    def __init__(self, fault: Callable[[int], float], *, here: bool = False) -> None:
        super().__init__()
        self.fault, self.here = fault, here

    def __getitem__(self, index: int) -> torch.Tensor:
        row = super().__getitem__(index)
        if index == 20 and (self.here or get_worker_info() is not None):
            row = row + self.fault(index)
        return row


def dies(index: int) -> float:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0


def leaves(index: int) -> float:
    os._exit(3)


def hangs(index: int) -> float:
    time.sleep(600)
    return 0.0


def fails(index: int) -> float:
    raise KeyError(f"row {index} is rotten")


def draws(index: int) -> float:
    return float(torch.rand(1))


def draws_with_numpy(index: int) -> float:
    return float(np.random.rand())


def draws_with_python(index: int) -> float:
    return random.random()


@pytest.mark.parametrize("fault", [dies, leaves, pytest.param(hangs, marks=pytest.mark.extended), fails])
def test_a_fault_of_a_worker_costs_nothing(
    fault: Callable[[int], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_loader_pool, "LEAST_PATIENCE_S", 1.0)
    make = lambda: DataLoader(Faulty(fault), 4)  # noqa: E731
    assert equal(loop(make, LoaderWorkers(), {2: on(2)}), loop(make))


@pytest.mark.parametrize("fault", [draws, draws_with_numpy, draws_with_python])
def test_a_rare_random_sample_is_made_with_the_script_s_own_numbers(fault: Callable[[int], float]) -> None:
    random.seed(5)
    np.random.seed(5)
    make = lambda: DataLoader(Faulty(fault, here=True), 4)  # noqa: E731
    ours = list(loop(make, LoaderWorkers(), {2: on(2)}))
    random.seed(5)
    np.random.seed(5)
    assert equal(ours, loop(make))


def test_a_batch_that_differs_is_not_handed_out() -> None:
    class Differs(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            # As a sum that several threads make differs from one thread's.
            return super().__getitem__(index) + (1.0 if os.getpid() != HERE else 0.0)

    make = lambda: DataLoader(Differs(), 4)  # noqa: E731
    assert equal(loop(make, LoaderWorkers(), {2: on(2), 8: off}), loop(make))


@pytest.mark.parametrize("place", ["_start", "ask"])
def test_an_exception_of_ours_leaves_the_loop_as_it_was(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def breaks(*_: Any) -> Any:
        nonlocal calls
        calls += 1
        raise OSError("no more processes")

    owner: Any = _loader_pool.Pool if place == "_start" else _loader_pool.Workers
    monkeypatch.setattr(owner, place, breaks)
    job = Job()
    batches = begin(job, DataLoader(Rows(), 4))
    switch = Switch(LoaderWorkers(), job)
    found = [next(batches)]
    if place == "_start":
        with pytest.raises(OSError, match="no more processes"):
            switch.on(2)
    else:
        switch.on(2)
    found += list(batches)
    switch.close()
    assert calls
    assert equal(found, DataLoader(Rows(), 4))


def test_an_exception_of_ours_costs_no_batch_that_torch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    batches = begin(job, DataLoader(Rows(), 4, num_workers=2))
    switch = Switch(LoaderPrefetch(), job)
    found = [next(batches)]
    switch.on(4)
    with monkeypatch.context() as patch:
        patch.setattr(Order, "due", {}.__getitem__)  # what is built in, and called by a line of ours
        found.append(next(batches))
    found += list(batches)
    switch.close()
    assert equal(found, DataLoader(Rows(), 4))


def kills_a_worker(pool: Pool) -> None:
    os.kill(pool.workers._workers[0].pid, signal.SIGKILL)


def kills_a_worker_that_holds_a_lock(pool: Pool) -> None:
    """As one may that is killed while it looks whether it is to end."""
    pool.workers._workers_done_event._cond.acquire()
    kills_a_worker(pool)


def finds_a_difference(pool: Pool) -> None:
    pool.compared(False)


@pytest.mark.parametrize(
    "happens",
    [
        kills_a_worker,
        pytest.param(kills_a_worker_that_holds_a_lock, marks=pytest.mark.extended),
        finds_a_difference,
    ],
)
def test_workers_that_are_given_up_under_a_deeper_queue_cost_no_batch(
    happens: Callable[[Pool], None],
) -> None:
    """Those of the script are asked for as many as torch lets them be."""
    job, found = Job(), []
    batches = begin(job, DataLoader(Rows(300), 4, num_workers=2))
    deeper = Switch(LoaderPrefetch(), job)
    deeper.on(4)
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    (pool,) = switch.prepare(2)
    for number, batch in enumerate(batches):
        found.append(batch)
        if number < 25 and not pool.proven:
            time.sleep(0.1)  # a batch is compared only if our worker's is there by then
        if number == 25:
            assert pool.proven
            happens(pool)
    assert pool.broken
    assert switch.action.why_not_stay([pool]) == pool.refused
    switch.close()
    deeper.close()
    assert equal(found, DataLoader(Rows(300), 4))


def test_what_a_worker_had_sent_before_it_died_costs_no_batch() -> None:
    """Tensors come as file descriptors, which have to be asked of the process that made them."""
    job, found = Job(), []
    batches = begin(job, DataLoader(Rows(), 4, num_workers=2))
    switch = Switch(LoaderWorkers(), job)
    switch.on(1)
    (pool,) = switch.prepare(1)
    found.append(next(batches))
    time.sleep(1.0)  # it has sent what it was asked for
    os.kill(pool.workers._workers[0].pid, signal.SIGKILL)
    pool.workers._workers[0].join()
    found += list(batches)
    assert pool.broken
    switch.close()
    assert equal(found, DataLoader(Rows(), 4))


@pytest.mark.extended
def test_what_cannot_be_collected_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loader_service, "COLLECT_S", 0.2)
    make = lambda: DataLoader(Faulty(hangs), 4)  # noqa: E731
    assert equal(loop(make, LoaderWorkers(), {2: on(2), 4: lambda switch: switch.close()}), loop(make))
