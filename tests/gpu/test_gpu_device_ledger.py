"""The device's clock on a real device: what events say of work of known length, and what asking costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from diagnose.core.ledger import DEVICE_COLUMNS, SLOT_OF, SLOTS
from diagnose.hooks._cuda import CudaDevice, cuda_in_use, device_of
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.device_clock import follow
from tests.running import DIAGNOSE, run, write

MS = 1_000_000
STEPS = 30
CYCLES_PER_MS_GUESS = 1_500_000
WARM_MS = 300
"""An idle card's clock is a sixth of its highest, and takes its time to rise."""

Rows = list[dict[str, int]]


@pytest.fixture
def device(gpu: torch.device) -> CudaDevice:
    torch.zeros(1, device=gpu)
    assert cuda_in_use()
    return CudaDevice(gpu.index)


@pytest.fixture
def busy_ms(device: CudaDevice) -> Callable[[float], None]:
    """Launches one kernel that runs for so long."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WARM_MS * CYCLES_PER_MS_GUESS)
    per_ms = 0.0
    for _ in range(2):
        begin.record()
        torch.cuda._sleep(20 * CYCLES_PER_MS_GUESS)
        end.record()
        end.synchronize()
        per_ms = max(per_ms, 20 * CYCLES_PER_MS_GUESS / begin.elapsed_time(end))
    return lambda ms: torch.cuda._sleep(int(ms * per_ms))


class Loop:
    """A loop of steps as the hooks tell them, on a real device."""

    def __init__(self, device: CudaDevice) -> None:
        self.recorder = Recorder()
        self.recorder.looks.cared.append(lambda: self.recorder.device or follow(self.recorder, device))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        interrupted = self.recorder.push(SLOT_OF[name])
        yield
        self.recorder.leave(SLOT_OF[name], interrupted)

    def rows(self) -> Rows:
        torch.cuda.synchronize()
        self.recorder.log.take_rows(10**6)
        _, rows = self.recorder.device.take_rows(10**6)
        return [dict(zip(DEVICE_COLUMNS, row, strict=True)) for row in rows]

    def steps(self, wait_ms: float, forward: Callable[[], Any], backward: Callable[[], Any]) -> Rows:
        for _ in range(STEPS):
            self.recorder.batch_asked()
            with self.phase("data_wait"):
                time.sleep(wait_ms / 1000)
            with self.phase("forward"):
                forward()
            with self.phase("backward"):
                backward()
            with self.phase("optimizer"):
                pass
            self.recorder.optimizer_stepped(1)
        self.recorder.batch_asked()
        return self.rows()


def mean_ms(rows: Rows, name: str) -> float:
    measured = [row[name] for row in rows[5:]]
    return sum(measured) / len(measured) / MS


def test_backward_time_does_not_bleed_into_the_data_wait(
    device: CudaDevice, busy_ms: Callable[[float], None]
) -> None:
    rows = Loop(device).steps(4.0, lambda: busy_ms(2.0), lambda: busy_ms(8.0))
    assert len(rows) == STEPS - 1
    assert all(row["holes"] == 0 for row in rows)
    assert mean_ms(rows, "backward") == pytest.approx(8.0, rel=0.05)
    assert mean_ms(rows, "forward") == pytest.approx(2.0, rel=0.1)
    assert mean_ms(rows, "data_wait") < 0.2


def test_a_data_wait_that_starves_the_device_is_charged_with_the_starvation(
    device: CudaDevice, busy_ms: Callable[[float], None]
) -> None:
    rows = Loop(device).steps(10.0, lambda: busy_ms(1.0), lambda: busy_ms(3.0))
    assert mean_ms(rows, "backward") == pytest.approx(3.0, rel=0.1)
    assert mean_ms(rows, "data_wait") == pytest.approx(6.2, abs=0.6)
    total_ms = sum(mean_ms(rows, name) for name in SLOTS)
    assert total_ms == pytest.approx(10.2, abs=0.6)


def test_recording_waits_for_nothing(device: CudaDevice, busy_ms: Callable[[float], None]) -> None:
    loop = Loop(device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            loop.recorder.batch_asked()
            loop.recorder.optimizer_stepped(1)
        begun = time.perf_counter()
        busy_ms(200.0)
        for _ in range(50):
            loop.recorder.batch_asked()
            with loop.phase("forward"):
                pass
            loop.recorder.optimizer_stepped(1)
        took = time.perf_counter() - begun
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert took < 0.1, "the device was busy for 0.2 s meanwhile"


def test_an_event_takes_microseconds(device: CudaDevice) -> None:
    loop = Loop(device)
    loop.steps(0.0, lambda: time.sleep(1e-4), lambda: time.sleep(1e-4))
    ledger = loop.recorder.device
    assert ledger is not None
    assert 0 < ledger.new_event_ns < 50_000
    assert ledger.event_ns < 20_000, "0 where none was used twice"


def test_asking_from_another_thread_does_not_break_a_capture(device: CudaDevice) -> None:
    import threading

    loop = Loop(device)
    loop.steps(0.0, lambda: time.sleep(1e-4), lambda: time.sleep(1e-4))
    stop = threading.Event()
    asked = 0

    def ask() -> None:
        nonlocal asked
        device.begin_reading()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.Stream())
        while not stop.is_set():
            device.has_passed(event)
            asked += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        numbers = torch.zeros(16, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                numbers += 1
                time.sleep(1e-3)
    finally:
        stop.set()
        thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert asked > 10
    assert numbers.eq(100).all()


def test_steps_with_a_capture_in_them_are_the_hosts_and_the_graph_is_whole(device: CudaDevice) -> None:
    loop = Loop(device)
    numbers = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    captured = 0

    def forward() -> None:
        nonlocal captured
        captured += 1
        if captured == 10:
            with torch.cuda.graph(graph), loop.phase("gc"):
                numbers.add_(1)
        numbers.mul_(1)

    rows = loop.steps(0.5, forward, lambda: None)
    assert [index for index, row in enumerate(rows) if row["holes"]] == [8]
    graph.replay()
    assert numbers.eq(1).all()


def test_the_device_is_the_one_that_the_model_is_on(gpu: torch.device) -> None:
    assert device_of([torch.nn.Linear(1, 1)]) is None
    found = device_of([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1).to(gpu)])
    assert found is not None
    assert found.index == gpu.index


FORKS = """
import os
import torch

os.environ["CUDA_VISIBLE_DEVICES"] = "" if {hidden} else os.environ.get("CUDA_VISIBLE_DEVICES", "0")
if {hidden}:
    raise SystemExit(int(torch.cuda.is_available()))
if not os.fork():
    torch.zeros(1, device="cuda")  # which a driver that the parent had started would refuse
    os._exit(0)
assert os.wait()[1] == 0
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(30):
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
if not os.fork():
    raise SystemExit(0)  # an end that frees what it has, the parent's events not among it
raise SystemExit(os.wait()[1])
"""


@pytest.mark.parametrize("hidden", [True, False])
def test_the_driver_is_the_scripts_to_start_and_its_children_end_well(gpu, hidden: bool, tmp_path) -> None:
    write(tmp_path / "train.py", FORKS.format(hidden=hidden))
    # At a process's end torch waits for autograd's threads of a device, up to 10 s: a fork has none to end.
    ended = run(*DIAGNOSE, "train.py", cwd=tmp_path, TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT="0")
    assert ended.code == 0, ended.stderr
