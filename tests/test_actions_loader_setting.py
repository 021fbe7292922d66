"""How many workers are tried, and the setting that gives the script torch's own, if they do the same."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Sampler

from diagnose.actions import _loader_choice, loader_prefetch
from diagnose.actions._loader_probe import Probed
from diagnose.actions.base import Action, CannotApply
from diagnose.actions.loader_prefetch import LoaderPrefetch
from diagnose.actions.loader_workers import LoaderWorkers
from diagnose.core.job import Job
from tests.loops import Rows, begin, children_end


def counted(cores: int, monkeypatch: pytest.MonkeyPatch, *, cpu_s: float, now: int = 0) -> list[int]:
    monkeypatch.setattr(_loader_choice, "cores", lambda job: cores)
    job = Job()
    batches = begin(job, DataLoader(Rows(), 4, num_workers=now))
    probed = Probed(batch_s=0.1, cpu_s=cpu_s)
    source = _loader_choice.Source(loader=job.loaders[0], batches=batches, probed=probed)
    return list(_loader_choice.counts(job, source))


def test_the_numbers_of_workers_that_are_tried_fit_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert counted(2, monkeypatch, cpu_s=0.1) == [1, 2]
    assert counted(8, monkeypatch, cpu_s=0.1) == [1, 4, 8]
    assert counted(64, monkeypatch, cpu_s=0.1) == [1, 4, 16], "never more than 16"
    assert counted(2, monkeypatch, cpu_s=0.01) == [1, 4, 8], "waiting needs no CPU"
    assert counted(2, monkeypatch, cpu_s=0.1, now=2) == [1]
    assert children_end()


def test_cores_are_shared_among_the_ranks_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert _loader_choice.cores(Job()) == 8
    assert _loader_choice.cores(Job(local_ranks=4)) == 2
    assert _loader_choice.cores(Job(local_ranks=16)) == 1


def test_one_cpu_is_not_shared_with_a_worker_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.stack([torch.arange(30000.0).sort().values.sum() for _ in range(5)])

    monkeypatch.setattr(_loader_choice.os, "sched_getaffinity", lambda pid: {0})
    job = Job()
    begin(job, DataLoader(Busy(), 4))
    with pytest.raises(CannotApply, match="there is one CPU"):
        LoaderWorkers().check(job)
    begin(job, DataLoader(Rows(sleep_ms=5), 4))
    LoaderWorkers().check(job)


def test_batches_that_do_not_fit_into_shared_memory_are_refused() -> None:
    assert "shared memory" in _loader_choice.lacks_memory(Probed(batch_bytes=1 << 50), 4)
    assert not _loader_choice.lacks_memory(Probed(batch_bytes=1000), 4)


def test_a_queue_that_a_file_names_has_to_fit_into_the_memory_here(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    batches = begin(job, DataLoader(Rows(), 4, num_workers=1))
    assert LoaderPrefetch().largest(job) == 8
    batch_bytes = 4 * 2 * 4
    room = 5 * batch_bytes / loader_prefetch.MEMORY_SHARE
    monkeypatch.setattr(loader_prefetch, "available_bytes", lambda: room)
    assert LoaderPrefetch().largest(job) == 4
    del batches


def test_what_makes_it_permanent_can_be_written_into_the_script() -> None:
    settings = LoaderWorkers().settings(Job(), 2)
    assert settings.keys() == {"DataLoader.num_workers", "note"}, "torch's persistent ones make other data"
    assert settings["DataLoader.num_workers"] == "2"
    assert "shuffled otherwise" in settings["note"]
    assert LoaderPrefetch().settings(Job(), 4) == {"DataLoader.prefetch_factor": "4"}
    assert Path(_loader_choice.SHARED_MEMORY).is_absolute()


class Eager(Sampler[int]):
    """Draws the order of an epoch as soon as somebody begins to iterate."""

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(37).tolist())

    def __len__(self) -> int:
        return 37


class EagerBatches(Eager):
    def __iter__(self) -> Iterator[Any]:
        return iter(np.array_split(np.random.permutation(37), 6))


@pytest.mark.parametrize("action", [LoaderWorkers(), LoaderPrefetch()])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"batch_sampler": EagerBatches()}, r"ask the sampler \(EagerBatches\) ahead"),
        ({"sampler": Eager()}, r"ask the sampler \(Eager\) ahead"),
        ({"shuffle": True, "generator": torch.Generator()}, r"ask the sampler \(BatchSampler\) ahead"),
        ({"worker_init_fn": print}, "worker_init_fn, which nobody calls without workers"),
        ({"in_order": False}, "in_order=False lets batches come in any order"),
        ({"shuffle": True}, "draws random numbers between iter"),
        ({"shuffle": True}, ""),
    ],
)
def test_where_torchs_own_workers_would_do_something_else_no_setting_is_named(
    action: Action, options: dict[str, Any], reason: str
) -> None:
    job = Job(facts={"drawn_before_batch": "draws" in reason})
    begin(job, DataLoader(Rows(), **options))
    settings = action.settings(job, 4)
    if reason:
        assert settings.keys() == {"note"}
        assert re.search(reason, settings["note"])
    else:
        assert "4" in settings.values()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_torchs_workers_begin_an_epoch_twice(num_workers: int) -> None:
    """What is said of samplers in words."""

    class Counting(Eager):
        begun = 0

        def __iter__(self) -> Iterator[int]:
            self.begun += 1
            return iter(range(37))

    sampler = Counting()
    list(DataLoader(Rows(), None, sampler=sampler, num_workers=num_workers))
    assert sampler.begun == 1 + num_workers


def test_where_processes_are_not_forked_by_default_the_script_is_told_to_fork_its_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on Python 3.14."""
    methods = ["forkserver", "spawn", "fork"]
    monkeypatch.setattr(_loader_choice.multiprocessing, "get_all_start_methods", lambda: methods)
    monkeypatch.setattr(
        _loader_choice.multiprocessing, "get_start_method", lambda allow_none=False: "forkserver"
    )
    job = Job()
    begin(job, DataLoader(Rows(), 4))
    LoaderWorkers().check(job)
    assert LoaderWorkers().settings(job, 2)["DataLoader.multiprocessing_context"] == '"fork"'


def test_a_script_that_has_chosen_to_spawn_processes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _loader_choice.multiprocessing, "get_start_method", lambda allow_none=False: "spawn"
    )
    job = Job()
    begin(job, DataLoader(Rows(), 4))
    with pytest.raises(CannotApply, match="workers that are started by spawn, not forked"):
        LoaderWorkers().check(job)


def test_windows_hold_several_bursts_of_the_workers_that_began_together() -> None:
    job = Job()
    begin(job, DataLoader(Rows(), 4, num_workers=4))
    action = LoaderWorkers()
    with action.prepare(job, 2):
        assert action.window_steps == 12
    with action.prepare(job, 5):
        assert action.window_steps == 15
    job.loaders.clear()
    job.iterators.clear()
