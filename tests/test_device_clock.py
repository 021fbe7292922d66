"""The device's clock from the hooks to the report: real loops, a real store, a device that is simulated."""

from __future__ import annotations

import gc
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import diagnose
from diagnose.analysis.device_ledger import (
    BY_DEVICE,
    by_device_clock,
    device_share,
    idle_at_most,
    idle_ns,
)
from diagnose.analysis.profile import load_profile
from diagnose.analysis.spans import part_of
from diagnose.core.finding import Finding
from diagnose.core.ledger import COLUMNS, COUNTS, DEVICE_COLUMNS, SLOTS
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.hooks import device_clock
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.device_clock import follow
from diagnose.launch import session
from diagnose.report import end_block
from diagnose.report._json import to_json
from diagnose.report._terminal import Terminal
from diagnose.report._text import to_text
from diagnose.rules import Rule, ask_one
from diagnose.store.reader import RankLog, read_rank
from tests.fakes import HOOKS, FakeClock, SlowData, SlowModel, SlowOptimizer, measured
from tests.recorded import MS, manifest, steps, writer
from tests.simulated_device import SharedClock, SimulatedDevice

# -- the hooks


def in_a_tuple(rows: list[torch.Tensor]) -> tuple[torch.Tensor]:
    """Batches whose size the loader's wrapper can tell without looking."""
    return (torch.stack(rows),)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """A collection that begins between an event and its entry is a hole, and rightly so."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.extended
@pytest.mark.usefixtures("uncollected")
def test_every_hook_of_the_loop_tells_the_device_ledger_too() -> None:
    """Wrappers keep what they write to: where the device has nothing to do, both clocks see the same."""
    device = SimulatedDevice(record_ns=0, latency_ns=0, event_ns=0)
    clock = SharedClock(device)
    with measured(clock) as recorder:
        loader = DataLoader(SlowData(clock, 60, MS), batch_size=1, collate_fn=in_a_tuple)
        model = SlowModel(clock, forward_ns=3 * MS, backward_ns=5 * MS)
        optimizer = SlowOptimizer(clock, model, step_ns=2 * MS)
        recorder.looks.cared.append(lambda: recorder.device or follow(recorder, device))
        for epoch in range(2):
            for (rows,) in loader:
                optimizer.zero_grad()
                clock.spend(MS)
                loss = model(rows).sum()
                clock.spend(epoch * MS)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        clock.spend(10 * MS)
        host = recorder.log.take_rows(1000)
        first, rows_by_device = recorder.device.take_rows(1000)
        assert first == 1
        assert len(rows_by_device) == len(host) - 1 == 119
        for by_host, by_device in zip(host[1:], rows_by_device, strict=True):
            assert by_device[0] == 0
            slack = 40_000 * np.ones(len(SLOTS))
            times = np.array(by_device[1 : 1 + len(SLOTS)])
            assert (abs(times - np.array(by_host[len(COUNTS) :])) < slack).all()


# -- the store, and what is made of it

BACKWARD_LATE = {"data_wait": 20.0, "backward": 5.0, "forward": 5.0}
"""What the host sees of a device that works the backward pass off while the loop waits for data."""

BY_ITS_OWN = {"data_wait": 4.0, "backward": 18.0, "forward": 8.0}


def device_rows(
    count: int, slots_ms: Mapping[str, float], holes: int = 0, dry_ms: Mapping[str, float] | None = None
) -> list[tuple[int, ...]]:
    values = {f"dry_{name}": ms for name, ms in (dry_ms or {}).items()} | dict(slots_ms)
    row = [int(values.get(name, 0) * MS) for name in DEVICE_COLUMNS]
    row[0] = holes
    return [tuple(row)] * count


def recorded(folder: Path, num_steps: int, *chunks: tuple[int, list[tuple[int, ...]]]) -> Path:
    run = manifest(folder)
    file = writer(run, device="cuda")
    file.add_steps(steps(0, num_steps, BACKWARD_LATE, spread=0))
    for first, rows in chunks:
        file.add_device_steps(first, rows)
    file.close()
    return run


def log_of(run: Path) -> RankLog:
    return by_device_clock(read_rank(run / "rank0.sqlite"))


def test_the_headline_is_the_devices_where_it_covers_the_steps(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 100, (1, device_rows(99, BY_ITS_OWN)))
    profile = load_profile(run)
    assert profile.device_clock_share == 0.99
    assert profile.phase_time_ns[Phase.DATA_WAIT] == pytest.approx(4 * MS + 16 * MS / 100)
    assert profile.phase_time_ns[Phase.BACKWARD] == pytest.approx(18 * MS - 13 * MS / 100)
    assert sum(profile.phase_time_ns.values()) == pytest.approx(profile.steps.total_time_ns / 100)
    shares = [phase["share"] for phase in to_json(profile)["phases"]]
    assert sum(shares) == pytest.approx(1)
    assert to_json(profile)["clock"] == {"device_share": 0.99}
    assert "By the device's clock in 99 % of the steps; the others are by the host's:" in to_text(
        profile, Terminal(width=200)
    )
    assert "; device clock on 99 % of steps" in end_block(profile)
    assert profile.history is not None
    assert profile.history.phase_ms[Phase.DATA_WAIT][-1] == pytest.approx(4)


def test_steps_with_a_hole_and_steps_never_resolved_are_the_hosts(tmp_path: Path) -> None:
    chunks = (
        (10, device_rows(50, BY_ITS_OWN)),
        (60, device_rows(10, BY_ITS_OWN, holes=2)),
        (70, device_rows(20, BY_ITS_OWN)),
    )
    log = log_of(recorded(tmp_path / "run", 100, *chunks))
    data_wait = log.steps[:, COLUMNS.index("data_wait")] / MS
    assert (data_wait == 4).nonzero()[0].tolist() == [*range(10, 60), *range(70, 90)]
    assert device_share(log, 0) == 0.7
    assert device_share(log, 50) == 0.6


def test_a_clock_that_was_heard_in_few_steps_is_not_used(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 100, (51, device_rows(49, BY_ITS_OWN)))
    profile = load_profile(run)
    assert profile.device_clock_share is None
    assert profile.phase_time_ns[Phase.DATA_WAIT] == pytest.approx(20 * MS)


@pytest.mark.parametrize("num_heard", [40, 90])
def test_a_run_on_a_device_that_was_not_heard_promises_nothing_of_waits(
    tmp_path: Path, num_heard: int
) -> None:
    class Waits(Rule):
        """A loader."""

        fires_on = silent_on = ()
        name = "waits"

        def check(self, profile: Profile) -> Finding:
            lost = {Phase.DATA_WAIT: 3.0 * MS, Phase.BACKWARD: 1.0 * MS}
            return Finding(
                rule="waits",
                summary="It waits",
                lost_ns=lost,
                low_ns=4.0 * MS,
                high_ns=4.0 * MS,
                assumption="all of it goes",
                evidence=(),
                fix="",
            )

    run = recorded(tmp_path / "run", 100, (0, device_rows(num_heard, BY_ITS_OWN)))
    profile = load_profile(run)
    finding = ask_one(Waits(), profile)
    assert finding is not None
    heard = num_heard == 90
    assert finding.low_ns == pytest.approx((4 if heard else 1) * MS)
    assert ("queued meanwhile" in finding.assumption) is not heard
    assert ("By the host's clock, as" in to_text(profile, Terminal(width=200))) is not heard
    assert ("; no device clock" in end_block(profile)) is not heard
    by_host = replace(profile, run=replace(profile.run, device="cpu"), device_clock_share=None)
    assert "clock" not in to_text(by_host, Terminal(width=200)) + end_block(by_host)


def test_a_part_of_a_run_keeps_its_own_steps_by_the_device(tmp_path: Path) -> None:
    log = log_of(recorded(tmp_path / "run", 100, (0, device_rows(80, BY_ITS_OWN))))
    part = part_of(log, 70, 90)
    assert device_share(part, 0) == 0.5
    assert len(part.device_steps) == 20


def test_a_file_of_before_there_was_such_a_clock_is_read_without_a_word(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", 30)
    with sqlite3.connect(run / "rank0.sqlite") as db:
        db.execute("DROP TABLE device_chunks")
    log = log_of(run)
    assert log.notes == []
    assert len(log.device_steps) == 0
    assert BY_DEVICE not in log.meta
    assert load_profile(run).device_clock_share is None


def test_damaged_rows_of_the_device_cost_only_themselves(tmp_path: Path) -> None:
    run = recorded(
        tmp_path / "run", 100, (0, device_rows(90, BY_ITS_OWN)), (90, device_rows(10, BY_ITS_OWN))
    )
    with sqlite3.connect(run / "rank0.sqlite") as db:
        db.execute("UPDATE device_chunks SET columns = x'00ff' WHERE first_step = 90")
        db.execute("INSERT INTO device_chunks VALUES (100000, 3, x'00')")
        db.execute("INSERT INTO device_chunks VALUES (-5, 3, x'00')")
    log = log_of(run)
    assert device_share(log, 0) == 0.9
    assert log.notes == ["rank0.sqlite: device_chunks is damaged; 3 of its rows are left out."]


def test_idleness_is_told_only_where_events_alone_can_tell_it(tmp_path: Path) -> None:
    sure = recorded(tmp_path / "a", 50, (0, device_rows(50, BY_ITS_OWN, dry_ms={"forward": 0.1})))
    assert idle_ns(log_of(sure), 1) == {
        **dict.fromkeys((phase for phase in Phase if phase is not Phase.OTHER), 0.0),
        Phase.DATA_WAIT: 4 * MS,
        Phase.FORWARD: 0.1 * MS,
    }
    launching = recorded(tmp_path / "b", 50, (0, device_rows(50, BY_ITS_OWN, dry_ms={"forward": 7})))
    assert idle_ns(log_of(launching), 1) is None
    assert load_profile(launching).device.idle_ns is None
    assert load_profile(sure).device.idle_ns is not None


def test_the_most_that_may_have_been_idle_is_told_in_any_case(tmp_path: Path) -> None:
    dry_ms = {"forward": 7.0, "gap_after_optimizer": 2.0}
    launching = recorded(tmp_path / "run", 50, (0, device_rows(50, BY_ITS_OWN, dry_ms=dry_ms)))
    told = load_profile(launching).device.idle_at_most_ns
    assert told is not None
    assert {phase: ns for phase, ns in told.items() if ns} == {
        Phase.DATA_WAIT: 4 * MS,
        Phase.FORWARD: 7 * MS,
        Phase.OTHER: 2 * MS,
    }
    unheard = log_of(recorded(tmp_path / "unheard", 50))
    assert idle_at_most(unheard, 1) is None


# -- a whole process


class Instant:
    """A device that is never behind, in real time."""

    def current_stream(self) -> str:
        return "main"

    def new_event(self) -> list[int]:
        return [0]

    def record(self, event: list[int], stream: str) -> None:
        event[0] = time.perf_counter_ns()

    def is_capturing(self) -> bool:
        return False

    def has_passed(self, event: list[int]) -> bool:
        return True

    def ms_between(self, earlier: list[int], later: list[int]) -> float:
        return (later[0] - earlier[0]) / MS

    def begin_reading(self) -> None:
        assert threading.current_thread().name == "diagnose-flusher"


def test_a_whole_process_writes_its_steps_by_both_clocks(tmp_path: Path) -> None:
    run = diagnose.attach(tmp_path / "run")
    assert session._session is not None
    recorder = session._session._recorder
    recorder.looks.cared.append(lambda: recorder.device or follow(recorder, Instant()))
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = TensorDataset(torch.ones(200, 8))
    for _ in range(2):
        for (rows,) in DataLoader(data, batch_size=4):
            time.sleep(0.002)
            model(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = diagnose.detach()
    raw = read_rank(run / "rank0.sqlite")
    assert len(raw.steps) == 100
    assert (raw.device_steps[1:, 0] == 0).all()
    by_host = raw.steps[1:, len(COUNTS) :].sum()
    by_device = raw.device_steps[1:, 1 : 1 + len(SLOTS)].sum()
    assert by_device == pytest.approx(by_host, rel=0.05)
    assert profile.device_clock_share == 1
    assert not recorder.notes


def test_on_a_build_without_cuda_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    recorder = Recorder()
    with HOOKS["device-clock"].install(recorder):
        assert not recorder.looks.cared
        assert not recorder.looks.flushed


def test_on_a_build_with_cuda_no_hook_asks_the_driver_for_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: object, **__: object) -> None:
        raise AssertionError(
            "the driver was started: CUDA_VISIBLE_DEVICES is settled, and forks are spoilt"
        )

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch._C, "_get_accelerator", asked)
    for module in (torch.cuda, torch.accelerator):
        for name in ("is_available", "device_count"):
            monkeypatch.setattr(module, name, asked)
    with measured(FakeClock()) as recorder:
        for look in (*recorder.looks.cared, *recorder.looks.inspections):
            look()
        for tell in recorder.looks.flushed:
            tell()
        assert not recorder.notes


def test_a_clock_does_not_begin_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = True
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
    monkeypatch.setattr(device_clock, "device_of", lambda modules: SimulatedDevice())
    recorder = Recorder()
    with HOOKS["device-clock"].install(recorder):
        (look,) = recorder.looks.cared
        look()
        assert recorder.device is None
        captured = False
        look()
        assert recorder.device is not None


def test_on_a_build_for_rocm_no_clock_begins_and_one_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    device = SimulatedDevice()
    monkeypatch.setattr(device_clock, "device_of", lambda modules: device)
    recorder = Recorder()
    with HOOKS["device-clock"].install(recorder):
        (look,) = recorder.looks.cared
        look()
        look()
    assert recorder.device is None
    assert not device.recorded
    assert list(recorder.notes) == [device_clock.NOT_READ]


def test_on_a_build_with_cuda_a_model_on_the_cpu_starts_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    clock = FakeClock()
    with measured(clock) as recorder:
        (look,) = [each for each in recorder.looks.cared if each.__module__ == device_clock.__name__]
        append = recorder.log.append
        model = SlowModel(clock)
        optimizer = SlowOptimizer(clock, model, step_ns=1)
        for rows in DataLoader(SlowData(clock, 8, 1), batch_size=1):
            model(rows).sum().backward()
            optimizer.step()
        assert recorder.steps >= 6
        assert recorder.device is None
        assert recorder.log.append == append
    assert not recorder.looks.cared
    assert look
