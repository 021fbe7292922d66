"""Rules of the input pipeline on real runs with a fault in them."""

from __future__ import annotations

import hashlib
import inspect
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import diagnose
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from tests.findings import INPUT, first, undisturbed

pytestmark = pytest.mark.alone

MS = 1e6


class Rows(Dataset[Any]):
    def __init__(self, num_rows: int, sleep_ms: float) -> None:
        self.num_rows, self.sleep_ms = num_rows, sleep_ms

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.sleep_ms / 1000)
        return torch.full((4,), float(index))


def slow_collate(rows: list[torch.Tensor]) -> torch.Tensor:
    end = time.thread_time() + 0.03
    while time.thread_time() < end:
        pass
    return torch.stack(rows)


def waiting_collate(rows: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.03)
    return torch.stack(rows)


POOL = ThreadPoolExecutor(1)


def pooled_collate(rows: list[torch.Tensor]) -> torch.Tensor:
    return POOL.submit(slow_collate, rows).result()


def train(loader: Any, epochs: int = 1) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for rows in loader:
            model(rows).sum().backward()
            optimizer.step()
            time.sleep(0.01)


def names(folder: Path, data: Dataset[Any], epochs: int = 1, **options: Any) -> tuple[list[str], Profile]:
    def measured(name: str) -> Profile:
        loader = DataLoader(data, batch_size=4, **options)
        diagnose.attach(folder / name)
        try:
            train(loader, epochs)
        finally:
            found = diagnose.detach()
        return found

    found = undisturbed(measured)
    return [finding.rule for finding in found.findings if finding.rule in INPUT], found


def test_a_sleeping_dataset_without_workers_is_serial_loading(tmp_path):
    found, run = names(tmp_path, Rows(160, 5))
    assert found == ["serial-loading"]
    finding = next(finding for finding in run.findings if finding.rule == "serial-loading")
    assert finding.lost_ns[Phase.DATA_WAIT] > 10 * MS
    assert "it waits for a disk, a network or a sleep" in " ".join(finding.evidence)


def test_a_slow_collate_function_without_workers_is_named(tmp_path):
    found, run = names(tmp_path, Rows(160, 0.5), collate_fn=slow_collate)
    assert found == ["slow-collate"]
    assert "slow_collate" in first(run).fix
    if sys.platform == "linux":  # lines are sampled
        begins = inspect.getsourcelines(slow_collate)[1]
        assert first(run).file == __file__
        assert begins < first(run).line < begins + 4, "in its loop"


def test_a_collate_function_that_lets_other_threads_compute_is_named(tmp_path):
    """As tokenizers do, in threads of their own. It is no wait for a disk or a network."""
    found, run = names(tmp_path, Rows(160, 0.5), collate_fn=pooled_collate)
    assert found == ["slow-collate"]
    assert run.input.collate_cpu_share is not None and run.input.collate_cpu_share > 0.7


def test_a_collate_function_that_waits_has_the_fault_of_a_dataset_that_does(tmp_path):
    """To make it work on whole batches would win nothing."""
    found, run = names(tmp_path, Rows(160, 0.5), collate_fn=waiting_collate)
    assert found == ["serial-loading"]
    assert run.input.collate_cpu_share is not None and run.input.collate_cpu_share < 0.2


def test_a_thread_that_computes_all_the_time_makes_no_collate_function_compute_that_waits(tmp_path):
    over = threading.Event()
    beside = threading.Thread(target=lambda: [hash_much() for _ in iter(over.is_set, True)])
    beside.start()
    try:
        _, run = names(tmp_path, Rows(160, 2), collate_fn=waiting_collate)
    finally:
        over.set()
        beside.join()
    assert run.input.collate_cpu_share is not None and run.input.collate_cpu_share < 0.5


def hash_much() -> bytes:
    """Computes without holding up other threads of Python's."""
    return hashlib.sha256(bytes(1 << 20)).digest()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
class TestWorkers:
    def test_one_sleeping_worker_is_too_few(self, tmp_path):
        found, run = names(tmp_path, Rows(240, 10), num_workers=1)
        assert run.host.cpus is not None
        assert found == ["too-few-workers" if run.host.cpus > 1 else "slow-storage"]

    def test_a_slow_collate_function_in_a_worker_is_named(self, tmp_path):
        assert names(tmp_path, Rows(160, 0.5), num_workers=1, collate_fn=slow_collate)[0] == [
            "slow-collate"
        ]

    def test_a_collate_function_of_a_worker_that_waits_is_not_to_be_rewritten(self, tmp_path):
        found, run = names(tmp_path, Rows(160, 0.5), num_workers=1, collate_fn=waiting_collate)
        assert run.host.cpus is not None
        assert found == ["too-few-workers" if run.host.cpus > 1 else "slow-storage"]

    def test_starting_workers_for_each_short_epoch_is_named(self, tmp_path):
        assert names(tmp_path, Rows(24, 0.5), epochs=8, num_workers=1)[0][:1] == ["worker-startup"]

    def test_workers_that_keep_up_have_no_fault(self, tmp_path):
        assert names(tmp_path, Rows(160, 1), num_workers=2, persistent_workers=True)[0] == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="lines are sampled on Linux alone")
@pytest.mark.parametrize("anew", [True, False], ids=["built anew", "changed by its method"])
def test_a_dataset_made_ready_for_each_epoch_is_no_work_on_its_batches(tmp_path: Path, anew: bool):
    class Windows(Dataset[torch.Tensor]):
        def __init__(self, seconds: float) -> None:
            self.cut(seconds)

        def cut(self, seconds: float) -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                sum(range(100))
            self.first = end

        def __len__(self) -> int:
            return 80

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.full((64,), float(index)) * (self.first > 0)

    model = nn.Linear(64, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dataset = Windows(0)
    loader = DataLoader(dataset, batch_size=8)
    diagnose.attach(tmp_path / "run")
    try:
        for _ in range(10):
            if anew:
                dataset = Windows(0.1)
                loader = DataLoader(dataset, batch_size=8)
            else:
                dataset.cut(0.1)
            for rows in loader:
                loss = model(rows).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    finally:
        run = diagnose.detach()
    assert run.input.epoch_start_gap_ns is not None and run.input.epoch_start_gap_ns > 8 * MS
    assert first(run).rule == "epoch-boundary-stall"
    assert not [finding for finding in run.findings if finding.rule == "slow-batch-building"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers report on Linux alone")
def test_a_loop_that_tokenizes_what_its_workers_deliver_is_found_in_a_real_run(tmp_path: Path):
    """The same work in a `collate_fn` is none of the loop's."""

    class Texts(Dataset[str]):
        def __len__(self) -> int:
            return 1200

        def __getitem__(self, index: int) -> str:
            return "some words of a text " * 12

    def encode(texts: list[str]) -> torch.Tensor:
        return torch.tensor([[float(ord(letter) % 7) for letter in text] for text in texts])

    def train(run: str, in_loop: bool) -> Profile:
        model = nn.Linear(252, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        loader = DataLoader(Texts(), batch_size=8, num_workers=1, collate_fn=list if in_loop else encode)
        diagnose.attach(tmp_path / run)
        try:
            for batch in loader:
                rows = encode(batch) if in_loop else batch
                loss = model(rows).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        finally:
            profile = diagnose.detach()
        return profile

    found = [each for each in train("in-the-loop", True).findings if each.rule == "slow-batch-building"]
    assert found and Path(found[0].file) == Path(__file__)
    assert not [each for each in train("in-workers", False).findings if each.rule == "slow-batch-building"]
