"""Workers that die, hang, raise or differ cost no sample, and the script sees what it would have seen."""

from __future__ import annotations

import multiprocessing
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, get_worker_info

from diagnose.actions import _loader_pool, _loader_service
from diagnose.actions._loader_order import Order
from diagnose.actions._loader_pool import Pool
from diagnose.actions.base import CannotApply
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.loader_workers_reseeded import LoaderWorkersReseeded
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, loop, off, on
from tests.test_actions_loader_order import KINDS, children_end, equal

HERE = os.getpid()


@pytest.fixture(autouse=True)
def no_child_is_left() -> Iterator[None]:
    yield
    assert children_end(), multiprocessing.active_children()


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


def differs(index: int) -> float:
    return 1.0


def draws(index: int) -> float:
    return float(torch.rand(1))


def draws_with_numpy(index: int) -> float:
    return float(np.random.rand())


def draws_with_python(index: int) -> float:
    return random.random()


@pytest.mark.parametrize("fault", [dies, leaves, hangs, fails])
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


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_script_s_own_exception_is_the_one_it_would_have_seen(num_workers: int) -> None:
    def seen(switch_at: int) -> list[Any]:
        job, seen = Job(), []
        loader = DataLoader(Faulty(fails, here=True), 4, num_workers=num_workers)
        batches = begin(job, loader)
        switch = Switch(LoaderWorkers(), job)
        for number in range(11):
            if number == switch_at:
                switch.on(3)
            try:
                seen.append(next(batches).tolist())
            except (KeyError, StopIteration) as error:
                seen.append((type(error), str(error).partition("Traceback")[0]))
        switch.close()
        return seen

    alone = seen(-1)
    assert seen(2) == alone
    assert KeyError in [each[0] for each in alone]


@pytest.mark.parametrize("kind", ["shuffle", "two workers"])
def test_two_loops_over_one_loader_at_once_and_one_over_another(kind: str) -> None:
    def rows(switched: bool) -> list[Any]:
        torch.manual_seed(2)
        job = Job()
        loader, other = KINDS[kind](), KINDS["generator"]()
        three = [begin(job, loader), begin(job, loader), begin(job, other)]
        job.iterators.append(three[0])
        job.loaders.append(loader)
        switch = Switch(LoaderWorkers(), job)
        found = []
        for number, batches in enumerate(zip(*three, strict=True)):
            found += [batch.tolist() for batch in batches]
            if switched and number == 2:
                switch.on(1)
            if switched and number == 6:
                switch.off()
        switch.close()
        return [*found, torch.rand(1).item()]

    assert rows(True) == rows(False)


def test_the_iterator_stays_the_script_s_and_its_length() -> None:
    job, loader = Job(), KINDS["shuffle"]()
    batches = begin(job, loader)
    before = type(batches), len(batches), set(vars(batches)), batches._dataset_fetcher
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    list(batches)
    assert (type(batches), len(batches)) == before[:2]
    assert batches._num_yielded == len(batches)
    switch.close()
    assert (set(vars(batches)), batches._dataset_fetcher) == before[2:]


def test_handlers_of_signals_are_left_alone() -> None:
    handler = signal.getsignal(signal.SIGCHLD)
    job = Job()
    begin(job, KINDS["shuffle"]())
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    assert signal.getsignal(signal.SIGCHLD) is handler
    switch.close()


class Levels(Rows):
    """Rows whose values the script changes."""

    level = 0.0

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.level


@pytest.mark.parametrize("every", [10, 3])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_dataset_that_the_script_changes_is_read_as_it_is(num_workers: int, every: int) -> None:
    def rows(switched: bool) -> list[Any]:
        job, dataset, found = Job(), Levels(), []
        loader = DataLoader(dataset, 4, num_workers=num_workers)
        switch = Switch(LoaderWorkers(), job)
        asked = 0
        for epoch in range(3):
            dataset.level = float(epoch)
            batches = begin(job, loader)
            for _ in range(10):
                if asked % every == 0:
                    dataset.level = asked / every
                if switched and asked == 2:
                    switch.on(3)
                asked += 1
                found.append(next(batches).tolist())
        switch.close()
        return found

    assert rows(True) == rows(False)


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


@pytest.mark.parametrize("happens", [kills_a_worker, kills_a_worker_that_holds_a_lock, finds_a_difference])
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


def test_what_cannot_be_collected_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loader_service, "COLLECT_S", 0.2)
    make = lambda: DataLoader(Faulty(hangs), 4)  # noqa: E731
    assert equal(loop(make, LoaderWorkers(), {2: on(2), 4: lambda switch: switch.close()}), loop(make))


def test_a_handler_s_exception_reaches_the_script() -> None:
    def rings(number: int, frame: object) -> None:
        raise TimeoutError("the script's own alarm")

    job = Job()
    batches = begin(job, DataLoader(Rows(sleep_ms=100), 4))
    switch = Switch(LoaderWorkers(), job)
    switch.on(2)
    found = [next(batches)]
    before = signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(TimeoutError, match="own alarm"):
            for batch in batches:
                found.append(batch)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    found += list(batches)
    switch.close()
    assert len(found) == 10, "what was waited for comes with the next call"
    assert equal(found, DataLoader(Rows(), 4))


def test_a_loop_that_is_dropped_leaves_its_workers_idle() -> None:
    job, loader = Job(), DataLoader(Rows(), 4)
    switch = Switch(LoaderWorkers(), job)
    batches = begin(job, loader)
    switch.on(2)
    next(batches)
    workers = switch.prepare(2)[0].workers
    job.iterators.clear()
    job.loaders.clear()
    del batches
    assert not workers._wanted
    switch.close()


def test_a_script_that_keeps_its_batches_does_not_run_out_of_files() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * len(os.listdir("/proc/self/fd")) + 160, limits[1]))
    try:
        kept = list(loop(lambda: DataLoader(Rows(400)), LoaderWorkers(), {2: on(2)}, epochs=1))
        files = [tempfile.TemporaryFile() for _ in range(40)]  # the script's own  # noqa: SIM115
        for file in files:
            file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert equal(kept, loop(lambda: DataLoader(Rows(400)), epochs=1))


def test_reseeded_workers_keep_the_order_and_draw_their_own_numbers() -> None:
    class Noisy(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.cat([super().__getitem__(index), torch.rand(1)])

    def first_column(*, switched: bool) -> tuple[list[float], list[float]]:
        job, rows = Job(), []
        torch.manual_seed(1)
        switch = Switch(LoaderWorkersReseeded(), job)
        batches = begin(job, DataLoader(Noisy(), 4, shuffle=True))
        for number, batch in enumerate(batches):
            rows.append(batch)
            if switched and number == 2:
                switch.on(2)
        switch.close()
        table = torch.cat(rows)
        return table[:, 0].tolist(), table[:, 2].tolist()

    ours, alone = first_column(switched=True), first_column(switched=False)
    assert ours[0] == alone[0]
    assert len(set(ours[1])) == 37
    job = Job()
    begin(job, DataLoader(Noisy(), 4))
    with pytest.raises(CannotApply, match="loader-workers-reseeded does that"):
        LoaderWorkers().check(job)
