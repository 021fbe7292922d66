"""DataLoader workers: what they do is measured from inside, and they do what they did before."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import diagnose
from diagnose.core.input import WorkerStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.hooks import _worker_reports
from diagnose.hooks._worker_readings import MAX_PART_BYTES, MAX_PIECES, bytes_of, checksum, pieces_of
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from tests.fakes import measured
from tests.running import REPOSITORY, run, write

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone"),
]

MS = 1_000_000


def busy(seconds: float) -> None:
    """Takes CPU time, however much of a CPU there is."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Rows(Dataset[Any]):
    """Rows that each take some milliseconds."""

    def __init__(self, num_rows: int, *, sleep_ms: float = 0, busy_ms: float = 0) -> None:
        self.num_rows, self.sleep_ms, self.busy_ms = num_rows, sleep_ms, busy_ms

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_ms / 1000)
        busy(self.busy_ms / 1000)
        return torch.full((2,), float(index))


def train(batches: Iterable[Any], step_s: float = 0.0) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in batches:
        model(rows).sum().backward()
        optimizer.step()
        time.sleep(step_s)


def profile_of(run_dir: Path, loader: DataLoader[Any], *, epochs: int = 1, step_s: float = 0.0) -> Profile:
    diagnose.attach(run_dir)
    try:
        for _ in range(epochs):
            train(loader, step_s)
    finally:
        profile = diagnose.detach()
    return profile


def workers_of(profile: Profile) -> WorkerStats:
    assert profile.input.workers is not None
    return profile.input.workers


# -- what workers do


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


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize("persistent", [False, True])
def test_samples_that_come_out_the_same_each_epoch_are_told_from_random_ones(tmp_path, persistent, random):
    class Augmented(Rows):
        def __getitem__(self, index: int) -> Any:
            noise = torch.rand(2) if random else torch.zeros(2)
            return {"rows": torch.full((2,), float(index)) + noise, "label": index, "name": "a"}

    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample["rows"] for sample in samples])

    loader = DataLoader(
        Augmented(40),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        collate_fn=collate,
        persistent_workers=persistent,
    )
    diagnose.attach(tmp_path / "run")
    for _ in range(3):
        train(loader, 0.1 if persistent else 0.0)  # a persistent worker's last half second is not sent
    workers = workers_of(diagnose.detach())
    assert (workers.repeated, workers.varied) == ((0, 4) if random else (4, 0))


class Picture:
    """Like an image of Pillow's: its pixels are behind an attribute that nobody can look into."""

    mode, size = "L", (2, 2)

    def __init__(self, pixels: bytes) -> None:
        self.pixels, self.im = pixels, object()

    def tobytes(self) -> bytes:
        return self.pixels


class Node:
    """Holds private attributes in slots, one of which may be missing."""

    __slots__ = ("__rows", "missing", "owner")

    def __init__(self, rows: torch.Tensor, owner: type = Picture) -> None:
        self.__rows, self.owner = rows, owner


class Store(dict[str, Any]):
    """Like the storage of a graph, which points back to it."""


@dataclass
class Graph:
    store: Store
    path: Path = Path("a.txt")
    kind: Any = float
    log: Any = print


@pytest.mark.parametrize(
    "make",
    [
        lambda value: Graph(Store(x=torch.full((3,), value), name="a")),
        lambda value: {"graph": (SimpleNamespace(x=value), 1)},
        lambda value: (Picture(bytes([int(value)])), None),
        lambda value: [Node(torch.tensor(value)), Path("a")],
        lambda value: Path(f"{value}.png"),
    ],
)
def test_a_sample_that_is_an_object_is_what_it_holds(make: Callable[[float], Any]):
    assert checksum(make(1.0)) == checksum(make(1.0)) is not None
    assert checksum(make(1.0)) != checksum(make(2.0))


class Tagged(set[int]):
    """Keeps members beside its attributes."""

    def __init__(self) -> None:
        super().__init__([1])
        self.tag = "a"


@pytest.mark.parametrize("opaque", [object(), Tagged(), Random(1), SimpleNamespace(), torch.float32])
def test_of_what_cannot_be_seen_whole_nobody_says_that_it_came_again(opaque: Any):
    assert checksum(opaque) is None
    assert checksum((torch.zeros(2), SimpleNamespace(x=opaque))) is None


def test_a_checksum_is_of_the_first_bytes_and_of_what_the_host_can_read():
    long = torch.zeros(2 * MAX_PART_BYTES, dtype=torch.uint8)
    changed = long.clone()
    changed[-1] = 1
    assert checksum(long) == checksum(changed) is not None, "so far nobody looks"
    assert checksum(torch.ones(2, 3).T) == checksum(torch.ones(3, 2))
    assert checksum(torch.zeros(2, dtype=torch.bfloat16)) is None
    assert checksum(torch.zeros(2, device="meta")) is None


class Notes(Dataset[Any]):
    """Samples of which each holds a tensor and some texts."""

    def __init__(self, num_texts: int) -> None:
        self.num_texts = num_texts

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, list[str]]:
        return torch.full((2,), float(index)), [f"note {index}"] * self.num_texts


@pytest.mark.parametrize(("num_texts", "pieces"), [(0, 1 + 1 + 1), (10, 1 + 1 + 1 + 10 * (1 + 2))])
def test_the_objects_that_a_batch_consists_of_are_counted(tmp_path, num_texts, pieces):
    diagnose.attach(tmp_path)
    train(rows for rows, _ in DataLoader(Notes(num_texts), batch_size=2, num_workers=1))
    assert workers_of(diagnose.detach()).pieces == pieces


def test_counting_objects_ends_in_what_holds_itself_or_nothing():
    holder: list[Any] = []
    holder.extend([holder] * 50)
    assert pieces_of(holder) == pieces_of([[[]] * 1000] * 1000) == MAX_PIECES
    assert pieces_of(torch.zeros(2)) == pieces_of("text") == pieces_of(None) == 1


def test_bytes_of_a_batch_are_those_of_its_tensors_texts_and_numbers():
    batch = {"rows": torch.zeros(4, 2), "names": ["a", "bc"], "scale": 0.5}
    assert bytes_of(batch) == 4 * 2 * 4 + 1 + 2 + 8
    assert bytes_of([batch, torch.eye(3).to_sparse()]) is None, "it does not say"
    assert bytes_of([0] * 2 * MAX_PIECES) is None, "too many to count"


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


# -- nothing that they do has changed


def test_batches_are_the_same_bit_for_bit(tmp_path):
    class Noisy(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(2) + index

    def batches() -> list[list[list[float]]]:
        torch.manual_seed(7)
        loader = DataLoader(Noisy(40), batch_size=4, num_workers=2, shuffle=True)
        return [rows.tolist() for _ in range(2) for rows in loader]

    plain = batches()
    diagnose.attach(tmp_path / "run")
    ours = batches()
    diagnose.detach()
    assert ours == plain


def test_the_iterator_keeps_its_type_length_and_attributes(tmp_path):
    loader = DataLoader(Rows(12), batch_size=2, num_workers=2)
    plain = iter(loader)
    diagnose.attach(tmp_path / "run")
    ours = iter(loader)
    diagnose.detach()
    assert type(ours) is type(plain)
    assert vars(ours).keys() == vars(plain).keys()
    assert len(ours) == len(plain) == 6
    assert [rows.tolist() for rows in ours] == [rows.tolist() for rows in plain]


def test_a_worker_sees_its_number_its_seed_and_its_own_init(tmp_path):
    def init(worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None
        info.dataset.seen = (worker_id, info.id, info.num_workers, info.seed - worker_id)

    class Tells(Rows):
        def __getitem__(self, index: int) -> Any:
            return self.seen

    def seen() -> list[Any]:
        torch.manual_seed(3)
        return list(DataLoader(Tells(4), batch_size=None, num_workers=2, worker_init_fn=init))

    plain = seen()
    diagnose.attach(tmp_path / "run")
    ours = seen()
    diagnose.detach()
    assert ours == plain
    assert {worker for worker, *_ in plain} == {0, 1}


def fails_in_fetch() -> None:
    class Broken(Rows):
        def __getitem__(self, index: int) -> Any:
            raise OSError(f"no image {index}")

    list(DataLoader(Broken(4), num_workers=2))


def fails_in_collate() -> None:
    def collate(rows: Any) -> Any:
        raise KeyError("label")

    list(DataLoader(Rows(4), num_workers=2, collate_fn=collate))


def fails_in_init() -> None:
    def init(worker_id: int) -> None:
        raise ValueError("no such device")

    list(DataLoader(Rows(4), num_workers=2, worker_init_fn=init))


def fails_in_a_stream() -> None:
    class Broken(IterableDataset[Any]):
        def __iter__(self) -> Iterator[int]:
            yield 1
            raise OSError("the line is dead")

    list(DataLoader(Broken(), num_workers=1))


def dies() -> None:
    class Dies(Rows):
        def __getitem__(self, index: int) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    list(DataLoader(Dies(4), num_workers=1))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 keeps our frame in a traceback")
@pytest.mark.parametrize(
    "fails", [fails_in_fetch, fails_in_collate, fails_in_init, fails_in_a_stream, dies]
)
def test_what_goes_wrong_in_a_worker_is_told_in_the_same_words(tmp_path, monkeypatch, fails):
    def words() -> str:
        with pytest.raises((OSError, KeyError, ValueError, RuntimeError)) as error:
            fails()
        return f"{type(error.value).__name__}: {re.sub('[0-9]{3,}', 'N', str(error.value))}"

    monkeypatch.setattr(
        torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2
    )  # seconds until they are gone
    plain = words()
    diagnose.attach(tmp_path / "run")
    try:
        assert words() == plain
    finally:
        diagnose.detach()


def test_a_worker_that_is_killed_leaves_what_it_had_reported(tmp_path):
    class DiesLate(Rows):
        def __getitem__(self, index: int) -> torch.Tensor:
            if index == 150:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    diagnose.attach(tmp_path / "run")
    # Torch notices in one of several ways: a signal, a closed pipe, a connection that is refused.
    with pytest.raises((RuntimeError, EOFError, OSError)):
        train(DataLoader(DiesLate(200, sleep_ms=10), num_workers=1))
    workers = workers_of(diagnose.detach())
    assert workers.num_workers == 1
    assert 30 <= workers.batches <= 150, "all but the last half second, longer on a busy machine"


def test_a_failure_of_our_own_in_a_worker_does_not_reach_the_script(tmp_path, monkeypatch):
    from diagnose.hooks import _worker
    from diagnose.hooks._worker_reports import inbox

    def fail(*args: Any) -> None:
        raise LookupError("our own")

    for method in ("fetch_begins", "fetched", "close", "__init__"):
        with monkeypatch.context() as patch, measured(time.perf_counter_ns):
            patch.setattr(_worker.WorkerLog, method, fail)
            rows = [batch.tolist() for batch in DataLoader(Rows(4), batch_size=2, num_workers=2)]
        assert rows == [[[0.0, 0.0], [1.0, 1.0]], [[2.0, 2.0], [3.0, 3.0]]], method
        inbox.close()


@pytest.mark.parametrize("junk", [b"", b"\xff\x00", b"[]", b"{}", b'"text"', b"[" * 5000])
def test_what_is_no_report_of_a_worker_is_ignored(tmp_path, junk):
    loader = DataLoader(Rows(30, sleep_ms=10), batch_size=2, num_workers=2)
    diagnose.attach(tmp_path / "run")
    batches = iter(loader)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(junk, _worker_reports.address_of(os.getpid()))
    train(batches)
    profile = diagnose.detach()
    assert profile.steps.count == 15
    assert workers_of(profile).batches == 15
    assert not any("error of our own" in note for note in profile.notes)


def test_a_report_fits_into_one_datagram_however_long_the_names_are(tmp_path):
    """Forty stacks of eight frames are the most that is sent."""
    frame = ["/" + "long/" * 50 + "file.py", 100_000, "name" * 20]
    from diagnose.core.workers import PER_OCTAVE
    from diagnose.hooks._worker_files import MAX_LINES
    from diagnose.hooks._worker_readings import (
        MAX_INDICES,
        MAX_SIGHTINGS,
        MAX_SLOWEST,
        POINTS,
    )
    from diagnose.hooks._worker_reports import MAX_DATAGRAM

    report = {
        "stacks": [[[frame] * 9, 10**12]] * 40,
        "numbers": [10**18] * 20,
        "opening": [[frame, 10**12]] * MAX_LINES,
        "spread": [[10**3, 10**12]] * 64 * PER_OCTAVE,
        "history": [[10**18] * 5] * POINTS,
        "sightings": [[10**12, 2**32]] * MAX_SIGHTINGS,
        "slowest": [[10**18, 10**18, 10**9, 10**9, [10**12] * MAX_INDICES]] * MAX_SLOWEST,
    }

    assert len(json.dumps(report).encode()) < MAX_DATAGRAM


def test_what_a_worker_of_an_earlier_measurement_still_reports_is_none_of_the_next() -> None:
    """Persistent workers outlive `detach`, and send their last report when they end."""
    box = _worker_reports.Inbox()
    reports = dict.fromkeys(_worker_reports.REPORT_KEYS, 0)

    def received(*pids: int) -> list[int]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for pid in pids:
                text = json.dumps({**reports, "pid": pid}).encode()
                sender.sendto(text, _worker_reports.address_of(os.getpid()))
        return [report["pid"] for report in box.receive()]

    box.open()
    box.loaders[11] = 0
    assert received(11, 12) == [11, 12]
    box.close()
    box.open()
    box.loaders[13] = 0
    assert received(11, 12, 13) == [12, 13]
    box.loaders[11] = 1
    assert received(11) == [11], "a new process of that number"
    box.close()
