"""A script that our workers serve sees what it sees alone: its exceptions, signals, iterators and files."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.actions.base import CannotApply
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.actions.loader_workers_reseeded import LoaderWorkersReseeded
from diagnose.core.job import Job
from tests.loops import Rows, Switch, begin, equal, loop, on
from tests.test_actions_loader_faults import Faulty, fails
from tests.test_actions_loader_order import KINDS

pytest_plugins = ("tests.loops",)
pytestmark = pytest.mark.usefixtures("no_child_is_left")


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
