"""What may go wrong for the ledger by the device's clock: lag, streams, graphs, a driver that fails."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest

from diagnose.core.ledger import SLOT_OF, SLOTS
from diagnose.hooks import _device_ledger
from tests.simulated_device import MS, US, Event, SimulatedDevice, Stream
from tests.simulated_loop import BACKWARD, FORWARD, OPTIMIZER, REST, Loop, near


def test_what_may_have_been_idle_begins_when_the_device_has_come_so_far() -> None:
    loop = Loop()
    for _ in range(8):
        loop.batch()
        loop.phase(FORWARD, ("launch", 5 * MS))
        loop.phase(BACKWARD, ("spend", 8 * MS), ("launch", 20 * MS))
        loop.optimizer(("launch", MS), ("wait", 0))
    for row in loop.finish()[2:]:
        assert row.times["backward"] == near(23 * MS)
        assert row.dry["backward"] == near(3 * MS)


@pytest.mark.parametrize("drift", [-50e-6, 0, 50e-6])
def test_clocks_that_run_apart_for_a_day_do_not_look_like_a_backlog(drift: float) -> None:
    """Two seconds of each of 40 half hours; between two dry moments the device is 20 ms behind."""
    offset = _device_ledger._Offset()
    for half_hour in range(40):
        begun_ns = half_hour * 1_800_000 * MS
        for tenth in range(20):
            for behind_ns in (0, 20 * MS):
                host_ns = begun_ns + tenth * 100 * MS + behind_ns
                offset.see(host_ns, round((host_ns + behind_ns) * (1 + drift)))
                assert offset.lag_ns == near(behind_ns, 50 * US)


@pytest.mark.parametrize("drift", [-50e-6, 0, 50e-6])
def test_clocks_that_run_apart_take_nothing_of_what_may_have_been_idle(drift: float) -> None:
    """A launch-bound loop, each phase of which is but some 30 us; recording an event takes 2 of them."""
    loop = Loop(SimulatedDevice(drift=drift))
    for step in range(2_500):
        loop.batch(("spend", 30 * US))
        for slot in (FORWARD, BACKWARD, OPTIMIZER):
            loop.phase(slot, *[("spend", 10 * US), ("launch", 3 * US)] * 3)
        loop.recorder.optimizer_stepped(1)
        if not step % 1_000:
            loop.read()
    for row in loop.finish()[2_000:]:
        for slot in (FORWARD, BACKWARD, OPTIMIZER):
            assert row.dry[SLOTS[slot]] >= 33 * US, "of 42, 9 are work"


def test_what_is_too_short_for_an_event_of_its_own_may_have_been_idle_too() -> None:
    loop = Loop()
    for _ in range(8):
        loop.batch(("spend", 30 * US))
        for _ in range(100):
            loop.phase(REST, ("spend", 3 * US))
        loop.phase(FORWARD, ("launch", 3 * US))
        loop.phase(BACKWARD, ("launch", 3 * US))
        loop.optimizer(("launch", 3 * US))
    for row in loop.finish()[2:]:
        assert sum(row.dry.values()) > 0.9 * (row.total_ns - 9 * US)


def test_a_device_that_is_behind_for_steps_that_take_seconds_has_not_been_idle() -> None:
    loop = Loop()
    for _ in range(10):
        loop.batch()
        loop.phase(FORWARD, ("launch", 700 * MS), ("spend", 600 * MS))
        loop.phase(BACKWARD, ("launch", 700 * MS), ("spend", 600 * MS))
        loop.optimizer(("launch", MS))
    for row in loop.finish()[5:]:  # by then it is a second behind
        assert row.total_ns == near(1401 * MS)
        assert sum(row.dry.values()) == near(0)


def test_nothing_on_the_path_of_a_step_waits_or_asks_for_the_device() -> None:
    loop = Loop()
    for _ in range(50):
        loop.usual()
    assert loop.device.queries == 0
    assert loop.device.recorded > 50
    with pytest.raises(AssertionError):
        loop.device.synchronize()


def test_a_look_takes_only_what_the_device_has_come_to() -> None:
    loop = Loop()
    for _ in range(10):
        loop.usual(kernel_ns=10 * MS)
    assert loop.read() == []
    loop.device.spend(200 * MS)
    assert [row.step for row in loop.read()] == [1, 2, 3, 4]
    loop.finish()
    assert [row.step for row in loop.rows] == list(range(1, 10))
    assert all(row.holes == 0 for row in loop.rows)


def test_events_are_used_again_when_they_have_been_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_ledger, "MAX_EVENTS", 40)
    loop = Loop()
    for _ in range(50):
        loop.usual()
        loop.device.wait_on_host()
        loop.read()
    assert [row.holes for row in loop.finish()] == [0] * 49


def test_a_step_without_an_event_to_spare_is_the_hosts_and_the_next_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_device_ledger, "MAX_EVENTS", 40)
    loop = Loop()
    for step in range(40):
        loop.usual()
        if step > 20:
            loop.device.wait_on_host()
            loop.read()
    rows = loop.finish()
    assert [row.step for row in rows] == list(range(1, 40))
    assert sum(row.holes > 0 for row in rows[:20]) >= 5
    assert all(row.holes == 0 for row in rows[22:])
    assert all(row.total_ns == near(4 * MS) for row in rows if not row.holes)


def test_a_device_that_hangs_costs_its_own_clock_and_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_device_ledger, "MAX_EVENTS", 100)
    monkeypatch.setattr(_device_ledger, "MAX_WAITING", 300)
    loop = Loop(SimulatedDevice(depth=10**6))
    for step in range(100):
        if step == 10:
            loop.device.hangs_ns = loop.device.now_ns
        loop.usual()
        loop.device.spend(10 * MS)
        loop.read()
    assert [row.step for row in loop.rows] == list(range(1, 10))
    ledger = loop.recorder.device
    assert ledger is not None
    assert not ledger.on
    assert ledger.gave_up == "the device has passed no event for too long"
    recorded = loop.device.recorded
    loop.usual()
    assert loop.device.recorded == recorded


def test_steps_in_which_a_graph_is_captured_are_the_hosts() -> None:
    loop = Loop()
    for step in range(12):
        loop.batch()
        loop.device.capturing = step in (5, 6)
        loop.phase(FORWARD, ("launch", MS))
        loop.device.capturing = False
        loop.phase(BACKWARD, ("launch", MS))
        loop.optimizer(("launch", MS))
    assert [row.step for row in loop.finish() if row.holes] == [5, 6]


def test_a_loop_that_goes_on_in_another_stream_is_followed_there() -> None:
    loop = Loop()
    for step in range(12):
        if step == 6:
            loop.device.main = loop.device.current = Stream("another", free_ns=loop.device.main.free_ns)
        loop.usual()
    rows = loop.finish()
    assert [row.step for row in rows if row.holes] == [6], "the step that goes on there"
    assert all(row.total_ns == near(4 * MS) for row in rows if not row.holes)


@pytest.mark.parametrize("inside", [True, False], ids=["the loader is", "the training is"])
def test_a_batch_that_is_asked_for_in_another_stream_is_not_where_the_step_runs(inside: bool) -> None:
    """TorchRec asks inside its stream of copies; a warm-up for graphs trains inside one of its own."""
    loop = Loop()
    device, other = loop.device, Stream("another")
    asked, trained = (other, device.main) if inside else (device.main, other)
    device.main = trained  # whose work the truth is of
    for _ in range(12):
        device.current = asked
        loop.batch(("spend", 10 * MS))
        device.current = trained
        loop.phase(FORWARD, ("launch", MS))
        loop.phase(BACKWARD, ("launch", 8 * MS), ("launch", 8 * MS))
        loop.optimizer(("launch", MS))
    device.current = asked
    rows = loop.finish()
    assert [row.step for row in rows if row.holes] == [1], "where it learns which stream it is"
    assert len(rows) == 11
    for row in rows[2:]:
        assert row.times["backward"] == near(16 * MS)
        assert row.times.get("data_wait", 0) == near(0), "it is behind"


def test_a_loop_without_a_loader_has_whole_steps_only() -> None:
    loop = Loop()
    for _ in range(12):
        loop.bare()
        loop.phase(REST, ("wait", 0))
    rows = loop.finish()
    assert [row.step for row in rows] == list(range(2, 12))
    assert all(row.total_ns == near(4 * MS) and not row.holes for row in rows)


@pytest.mark.parametrize("call", ["record", "new_event", "is_capturing", "current_stream"])
def test_a_driver_that_fails_on_the_training_thread_ends_the_clock_and_not_the_step(call: str) -> None:
    loop = Loop()
    refuse = breakable(loop.device, call)
    for _ in range(4):
        loop.usual()
    refuse.append(True)
    for _ in range(4):
        loop.usual()
    ledger = loop.recorder.device
    assert ledger is not None
    assert ledger.gave_up == "an event could not be recorded"
    assert any("the driver said no" in note for note in loop.recorder.notes)
    assert len(loop.recorder.log.take_rows(100)) == 7, "the host's clock goes on"


@pytest.mark.parametrize("call", ["has_passed", "ms_between", "begin_reading"])
def test_a_driver_that_fails_in_the_flushers_thread_ends_the_clock_too(call: str) -> None:
    loop = Loop()
    breakable(loop.device, call).append(True)
    for _ in range(4):
        loop.usual()
    assert loop.finish() == []
    ledger = loop.recorder.device
    assert ledger is not None
    assert not ledger.on
    assert ledger.gave_up == "the device's events could not be read"
    refused = len(loop.device.refusals)
    loop.usual()
    assert loop.read() == []
    assert len(loop.device.refusals) == refused == 1, "and it is not tried again"


def breakable(device: SimulatedDevice, call: str) -> list[bool]:
    """Makes a call raise as soon as something is in the list."""
    broken: list[bool] = []
    original = getattr(device, call)

    def may_refuse(*args: Any) -> Any:
        if broken:
            device.refusals.append(call)
            raise RuntimeError("the driver said no")
        return original(*args)

    setattr(device, call, may_refuse)
    return broken


def test_a_collection_between_an_event_and_its_entry_counts_once() -> None:
    """An entry takes memory, and that may start the collector, whose pause has events of its own."""
    loop = Loop()
    record = loop.device.record
    pauses = [False] * 20 + [True]

    def interrupted(event: Event, stream: Stream) -> None:
        record(event, stream)
        if pauses and pauses.pop(0):
            slot = loop.recorder.push(SLOT_OF["gc"])
            loop.device.spend(30 * MS)
            loop.recorder.run_into(slot)

    loop.device.record = interrupted  # type: ignore[method-assign]
    for _ in range(12):
        loop.usual()
        loop.phase(REST, ("wait", 0))
    rows = loop.finish()
    assert not pauses
    assert sum(row.total_ns for row in rows) == near(11 * 4 * MS + 30 * MS, 11 * 40 * US)
    assert sum(row.holes for row in rows) == 1, "whose slots are in the wrong order is the host's"


def test_a_collection_while_an_entry_is_made_puts_no_event_into_two_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Up to Python 3.11 the collector runs where something is allocated."""
    monkeypatch.setattr(_device_ledger, "MAX_EVENTS", 40)
    loop = Loop()
    collections, hoard = 0, [(place, place) for place in range(5_000)]

    def pause(phase: str, _: Any) -> None:
        nonlocal collections, interrupted
        if phase == "start":
            interrupted = loop.recorder.push(SLOT_OF["gc"])
            loop.device.spend(30 * US)
        else:
            loop.recorder.run_into(interrupted)
            collections += 1

    interrupted = 0
    was, before = gc.get_threshold(), gc.isenabled()
    gc.freeze()
    gc.callbacks.append(pause)
    gc.set_threshold(1, 10**6, 10**6)
    try:
        for step in range(100):
            gc.enable()
            loop.usual()
            loop.phase(REST, ("wait", 0))
            gc.disable()
            loop.read()
            hoard += [(step, place) for place in range(200)]  # else pairs are made of those that were freed
    finally:
        gc.callbacks.remove(pause)
        gc.set_threshold(*was)
        gc.unfreeze()
        if before:
            gc.enable()
    loop.finish()
    ledger = loop.recorder.device
    assert ledger is not None and ledger.on
    assert collections > 500
    assert len(ledger._free) == len({id(event) for event in ledger._free}) <= 40


def test_a_forked_child_has_no_device() -> None:
    loop = Loop()
    for _ in range(4):
        loop.usual()
    recorded = loop.device.recorded
    loop.recorder.looks.cared.clear()
    loop.recorder.reset()
    for _ in range(4):
        loop.usual()
    assert loop.device.recorded == recorded
    assert loop.read() == []


def test_what_recording_takes_is_told_apart_for_new_events_and_used_ones() -> None:
    """The driver makes an event where it is first recorded: that is no cost of each step."""
    loop = Loop()
    known: set[int] = set()
    record = loop.device.record

    def dear_at_first(event: Event, stream: Stream) -> None:
        if id(event) not in known:
            known.add(id(event))
            time.sleep(1e-3)
        record(event, stream)

    loop.device.record = dear_at_first  # type: ignore[method-assign]
    for _ in range(100):
        loop.usual()
        loop.device.wait_on_host()
        loop.read()
    ledger = loop.recorder.device
    assert ledger is not None
    facts = ledger.facts()
    assert facts["new_events"] == len(known) < 60 < facts["events"]
    assert facts["event_ns"] < MS / 10 < MS < facts["new_event_ns"]
