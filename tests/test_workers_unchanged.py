"""Workers that are measured do what they did before: batches, seeds, failures and their ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

import diagnose
from diagnose.hooks import _worker_reports
from tests.fakes import measured
from tests.with_workers import Rows, train, workers_of

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone"),
]


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
