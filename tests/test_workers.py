"""DataLoader workers: what they do is measured from inside."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import diagnose
from diagnose.core.phases import Phase
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from tests.running import REPOSITORY, run, write
from tests.with_workers import MS, Notes, Rows, busy, profile_of, train, workers_of

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone"),
]


def test_workers_that_wait_for_a_disk_are_told_from_workers_that_compute(tmp_path):
    waiting = DataLoader(Rows(80, sleep_ms=4), batch_size=4, num_workers=2)
    computing = DataLoader(Rows(80, busy_ms=4), batch_size=4, num_workers=2)
    wait = workers_of(profile_of(tmp_path / "waiting", waiting))
    compute = workers_of(profile_of(tmp_path / "computing", computing))
    assert (wait.num_workers, wait.batches) == (compute.num_workers, compute.batches) == (2, 20)
    assert 16 * MS < wait.fetch_ns < 30 * MS
    assert compute.fetch_ns > 16 * MS, "more where another process has the CPU"
    assert wait.cpu_share < 0.25
    assert compute.cpu_share * compute.fetch_ns > 15.5 * MS
    assert compute.cpu_share > wait.cpu_share


def test_fetch_and_collate_are_told_apart_in_workers(tmp_path):
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.01)
        return torch.stack(rows)

    loader = DataLoader(Rows(40, sleep_ms=10), batch_size=2, num_workers=2, collate_fn=collate)
    workers = workers_of(profile_of(tmp_path / "run", loader))
    assert 10 * MS < workers.collate_ns < 16 * MS
    assert 20 * MS < workers.fetch_ns < 30 * MS


@pytest.mark.parametrize("num_workers", [0, 1])
def test_fetch_and_collate_of_a_slow_loader_are_told_apart(tmp_path, num_workers):
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(0.01)
        return torch.stack(rows)

    loader = DataLoader(Rows(80, sleep_ms=10), batch_size=2, num_workers=num_workers, collate_fn=collate)
    found = profile_of(tmp_path / "run", loader).input
    if num_workers:
        assert found.fetch_ns is None
        assert found.collate_ns is None
    else:
        assert found.workers is None
        assert found.fetch_ns == pytest.approx(20 * MS, rel=0.2)
        assert found.collate_ns == pytest.approx(10 * MS, rel=0.2)


class Helped(Rows):
    """Rows that another thread computes, which the worker waits for."""

    def __getitem__(self, index: int) -> torch.Tensor:
        helper = threading.Thread(target=busy, args=(self.busy_ms / 1000,))
        helper.start()
        helper.join()
        return torch.full((2,), float(index))


def test_what_helper_threads_of_the_dataset_compute_is_not_taken_for_sending(tmp_path):
    helped = DataLoader(Helped(80, busy_ms=4), batch_size=4, num_workers=1)
    found = workers_of(profile_of(tmp_path / "run", helped))
    assert found.helper_ns is not None
    assert 14 * MS < found.helper_ns < 24 * MS
    assert found.send_ns < 4 * MS
    assert found.cpu_share < 0.5, "the worker itself waits"


def test_what_pickles_batches_is_no_helper_thread(tmp_path):
    diagnose.attach(tmp_path)
    train(rows for rows, _ in DataLoader(Notes(20_000), batch_size=2, num_workers=1))
    found = workers_of(diagnose.detach())
    assert found.helper_ns is not None
    assert found.send_ns > 1 * MS
    assert found.helper_ns < 0.25 * found.send_ns


def test_files_that_workers_open_for_a_sample_are_counted_and_what_they_read(tmp_path):
    files = [tmp_path / f"{number}.bin" for number in range(8)]
    for file in files:
        file.write_bytes(bytes(50_000))

    class Tiles(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            read = 0
            for file in files:
                with file.open("rb") as opened:
                    read += len(opened.read())
            return torch.full((2,), float(read))

    found = workers_of(profile_of(tmp_path / "run", DataLoader(Tiles(2400), batch_size=4, num_workers=2)))
    assert found.reading is not None
    assert (found.reading.opens, found.reading.samples) == (4 * 8, 4)
    assert found.reading.read_bytes == pytest.approx(4 * 8 * 50_000, rel=0.01)
    assert found.reading.reads == pytest.approx(2 * 4 * 8, rel=0.1), "each until its end"
    assert found.reading.made_bytes == 4 * 2 * 4
    assert found.reading.share is not None and found.reading.share > 0.5


def test_a_dataset_in_memory_opens_nothing(tmp_path):
    found = workers_of(profile_of(tmp_path / "run", DataLoader(Rows(160), batch_size=4, num_workers=2)))
    assert found.reading is not None
    assert (found.reading.opens, found.reading.samples) == (0, 4)
    assert found.reading.read_bytes is not None and found.reading.read_bytes < 1000, "our own readings"


def test_an_empty_queue_shows_slow_workers_and_a_full_one_a_slow_loop(tmp_path):
    slow = DataLoader(Rows(40, sleep_ms=10), batch_size=2, num_workers=2)
    fast = DataLoader(Rows(60), batch_size=2, num_workers=2)
    slow_workers = workers_of(profile_of(tmp_path / "slow", slow))
    fast_workers = workers_of(profile_of(tmp_path / "fast", fast, step_s=0.02))
    assert slow_workers.ready_batches is not None
    assert slow_workers.ready_batches < 1, "of the four that two workers prefetch, on a busy machine too"
    assert fast_workers.ready_batches is not None
    assert fast_workers.ready_batches > 2, "two workers prefetch two batches each"
    assert slow_workers.idle_share < 0.8 * fast_workers.idle_share


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_of_every_epoch_are_counted_and_sampled(tmp_path, persistent):
    rows = Rows(160, busy_ms=5)
    loader = DataLoader(rows, batch_size=2, num_workers=2, persistent_workers=persistent)
    profile = profile_of(tmp_path / "run", loader, epochs=3)
    del loader
    workers = workers_of(profile)
    assert workers.num_workers == (2 if persistent else 6)
    assert workers.at_once == 2
    # A persistent worker that lives on has not sent its last half second, of one or more.
    assert workers.batches == 240 or (persistent and workers.batches > 60)
    log = read_rank(tmp_path / "run" / "rank0.sqlite")
    sampled_ns = sum(weight for _, weight in log.worker_samples)
    busy_ns = sum(worker["fetch_ns"] + worker["collate_ns"] for worker in log.workers)
    assert sampled_ns == pytest.approx(busy_ns, rel=0.3)
    line = next(line for line in profile.where if line.in_worker)
    assert (line.phase, line.function) == (Phase.DATA_WAIT, "busy")
    assert log.meta["notes"] == []


def test_what_a_worker_does_outside_the_script_is_not_blamed_on_the_line_that_started_it(tmp_path):
    rows: Any = [torch.zeros(2)] * 60_000
    found = profile_of(tmp_path / "run", DataLoader(rows, batch_size=2000, num_workers=1))
    samples = read_rank(tmp_path / "run" / "rank0.sqlite").worker_samples
    assert samples
    assert {len(stack) for stack, _ in samples} == {1}, "the package's frame alone, for there is no user's"
    assert not [line for line in found.where if line.in_worker]


def test_an_iterable_dataset_in_workers_is_measured(tmp_path):
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(30):
                time.sleep(0.005)
                yield torch.ones(2)

    workers = workers_of(profile_of(tmp_path / "run", DataLoader(Stream(), batch_size=3, num_workers=2)))
    assert workers.batches >= 20
    assert workers.fetch_ns > 13 * MS
    assert workers.cpu_share < 0.3


def test_workers_leave_no_records_of_their_own(tmp_path):
    profile_of(tmp_path / "run", DataLoader(Rows(40), batch_size=2, num_workers=2))
    assert [path.name for path in rank_files(tmp_path / "run")] == ["rank0.sqlite"]


@pytest.mark.extended
def test_spawned_workers_are_measured_too(tmp_path):
    write(
        tmp_path / "job.py",
        """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Rows(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.ones(2)
if __name__ == "__main__":
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in DataLoader(Rows(), batch_size=2, num_workers=2, multiprocessing_context="spawn"):
        model(rows).sum().backward()
        optimizer.step()
""",
    )
    (tmp_path / "run").mkdir()
    boot = REPOSITORY / "diagnose" / "launch" / "boot"
    ended = run(
        sys.executable, "job.py", cwd=tmp_path, PYTHONPATH=str(boot), DIAGNOSE_RUN=str(tmp_path / "run")
    )
    assert (ended.code, ended.stderr) == (0, "")
    (path,) = rank_files(tmp_path / "run")
    log = read_rank(path)
    assert [worker["batches"] for worker in log.workers] == [10, 10]
    assert all(10 * MS < worker["fetch_ns"] / 10 < 16 * MS for worker in log.workers)
    assert any(stack[1][2] == "Rows.__getitem__" for stack, _ in log.worker_samples)
    assert log.meta["notes"] == []


def test_slow_batches_among_fast_ones_show_in_the_spread(tmp_path):
    class Uneven(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            time.sleep(0.1 if index % 40 == 20 else 0.001)
            return torch.ones(2)

    even = workers_of(
        profile_of(tmp_path / "even", DataLoader(Rows(160, sleep_ms=4), batch_size=4, num_workers=1))
    )
    uneven = workers_of(
        profile_of(tmp_path / "uneven", DataLoader(Uneven(160), batch_size=4, num_workers=1))
    )
    assert even.tail_share is not None and uneven.tail_share is not None
    assert even.median_ns == pytest.approx(even.fetch_ns, rel=0.5)
    assert uneven.tail_share > 0.5 > even.tail_share
    assert uneven.tail_batches is not None and 0.05 < uneven.tail_batches < 0.5, (
        "one in ten, on a free machine"
    )
    assert uneven.longest_ns is not None and uneven.longest_ns > 100 * MS
    assert uneven.slowest[0].took_ns == uneven.longest_ns
    for batch in uneven.slowest[:3]:
        assert any(index % 40 == 20 for index in batch.samples) and batch.num_samples == 4
        assert list(batch.samples) == list(range(4 * batch.before, 4 * batch.before + 4))


def test_workers_that_compete_for_a_cpu_say_so(tmp_path):
    cpus = len(os.sched_getaffinity(0))
    rival = DataLoader(Rows(cpus * 120, busy_ms=3), batch_size=4, num_workers=3 * cpus)
    alone = DataLoader(Rows(40, sleep_ms=3), batch_size=4, num_workers=1)
    crowded = workers_of(profile_of(tmp_path / "crowded", rival))
    sleeping = workers_of(profile_of(tmp_path / "sleeping", alone))
    assert crowded.delay_share is not None and sleeping.delay_share is not None
    assert crowded.delay_share > 0.4, "three workers for each CPU"
    assert sleeping.delay_share < crowded.delay_share
    assert crowded.cpu_share + crowded.delay_share == pytest.approx(1.0, abs=0.15)


def test_the_busiest_of_uneven_workers_is_known(tmp_path):
    class AllInOne(IterableDataset[Any]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            info = get_worker_info()
            assert info is not None
            for _ in range(60 if info.id == 0 else 0):
                time.sleep(0.002)
                yield torch.ones(2)

    uneven = workers_of(
        profile_of(tmp_path / "uneven", DataLoader(AllInOne(), batch_size=2, num_workers=3))
    )
    even = workers_of(
        profile_of(tmp_path / "even", DataLoader(Rows(120, sleep_ms=2), batch_size=2, num_workers=3))
    )
    assert uneven.busiest == pytest.approx(3, abs=0.1)
    assert even.busiest is not None and even.busiest < 1.5
