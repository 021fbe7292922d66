"""The ledger by the device's clock: work where it was launched, idleness to what the host did meanwhile."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnose.core.ledger import DEVICE_COLUMNS, SLOT_OF, SLOTS
from diagnose.hooks import _device_ledger
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.device_clock import follow
from tests.simulated_device import MS, US, Event, SimulatedDevice, Stream

DATA_WAIT, COPY, FORWARD, BACKWARD, OPTIMIZER = (
    SLOT_OF[name] for name in ("data_wait", "copy", "forward", "backward", "optimizer")
)
REST = SLOT_OF["gap_after_rest"]


@dataclass
class Row:
    """A step by the device's clock."""

    step: int
    holes: int
    times: dict[str, int]
    dry: dict[str, int]

    @property
    def total_ns(self) -> int:
        return sum(self.times.values())


@dataclass
class Loop:
    """A training loop on a simulated device, with the recorder that the hooks would call."""

    device: SimulatedDevice = field(default_factory=SimulatedDevice)
    ends: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recorder = Recorder()
        self.recorder.clock = self.device
        self.device.slot = lambda: self.recorder.current
        self.recorder.looks.cared.append(self._follow)
        self.rows: list[Row] = []

    def _follow(self) -> None:
        if self.recorder.device is None:
            follow(self.recorder, self.device)

    def phase(self, slot: int, *doings: tuple[str, int]) -> None:
        """A span of the loop: `spend` on the host, or `launch`, for so many nanoseconds; or `wait`."""
        interrupted = self.recorder.push(slot)
        self.device.enter(slot)
        self.run(*doings)
        self.recorder.leave(slot, interrupted)
        self.device.enter(self.recorder.current)

    def run(self, *doings: tuple[str, int]) -> None:
        for name, time_ns in doings:
            if name == "wait":
                self.device.wait_on_host()
            else:
                getattr(self.device, name)(time_ns)

    def batch(self, *doings: tuple[str, int]) -> None:
        self.recorder.batch_asked()
        self.ends.append(self.device.now_ns)
        self.phase(DATA_WAIT, *doings)

    def optimizer(self, *doings: tuple[str, int]) -> None:
        self.phase(OPTIMIZER, *doings)
        self.recorder.optimizer_stepped(1)

    def usual(self, wait_ns: int = 0, kernel_ns: int = MS) -> None:
        """A step of four kernels."""
        self.batch(("spend", wait_ns))
        self.phase(FORWARD, ("launch", kernel_ns))
        self.phase(BACKWARD, ("launch", kernel_ns), ("launch", kernel_ns))
        self.optimizer(("launch", kernel_ns))

    def bare(self, kernel_ns: int = MS) -> None:
        """A step of a loop that asks no loader."""
        self.recorder.work_begins()
        self.phase(FORWARD, ("launch", kernel_ns))
        self.phase(BACKWARD, ("launch", kernel_ns), ("launch", kernel_ns))
        self.optimizer(("launch", kernel_ns))

    def read(self) -> list[Row]:
        """What the flusher's thread finds now; the host's log is read, too."""
        self.recorder.log.take_rows(10**6)
        if self.recorder.device is not None:
            first, rows = self.recorder.device.take_rows(10**6)
            self.rows += [row_of(first + index, row) for index, row in enumerate(rows)]
        return self.rows

    def finish(self) -> list[Row]:
        """Ends the last step, and waits as the end of a script does."""
        self.recorder.batch_asked()
        self.ends.append(self.device.now_ns)
        self.device.spend(1)
        self.device.now_ns = max(self.device.now_ns, self.device.main.free_ns) + MS
        return self.read()


def row_of(step: int, row: tuple[int, ...]) -> Row:
    named = dict(zip(DEVICE_COLUMNS, row, strict=True))
    return Row(
        step=step,
        holes=named["holes"],
        times={slot: named[slot] for slot in SLOTS if named[slot]},
        dry={slot: named[f"dry_{slot}"] for slot in SLOTS if named[f"dry_{slot}"]},
    )


def near(ns: int, slack_ns: int = 40 * US) -> Any:
    """Within what events and launches take."""
    return pytest.approx(ns, abs=slack_ns)


@pytest.fixture(scope="module", autouse=True)
def hypothesis_at_work() -> None:
    """Hypothesis measures the garbage collector, too, from its first test on."""
    given(st.none())(lambda nothing: None)()


# -- what belongs to whom


def test_backward_time_that_is_worked_off_during_the_data_wait_stays_backward() -> None:
    loop = Loop()
    for _ in range(8):
        loop.batch(("spend", 3 * MS))
        loop.phase(FORWARD, ("launch", 2 * MS))
        loop.phase(BACKWARD, ("launch", 6 * MS))
        loop.optimizer(("launch", MS))
    for row in loop.finish()[2:]:
        assert row.times.get("data_wait", 0) == near(0)
        assert row.times["backward"] == near(6 * MS)
        assert row.total_ns == near(9 * MS)


def test_only_the_part_of_a_data_wait_in_which_the_device_has_run_dry_is_data_wait() -> None:
    loop = Loop()
    for _ in range(8):
        loop.usual(wait_ns=10 * MS)
    for row in loop.finish()[2:]:
        assert row.times["data_wait"] == near(6 * MS)
        assert row.times["backward"] == near(2 * MS)
        assert row.dry["data_wait"] == near(6 * MS)
        assert row.dry.get("backward", 0) == near(0)


def test_a_step_that_waits_for_its_loss_is_charged_to_what_computes_it() -> None:
    loop = Loop()
    for _ in range(8):
        loop.usual()
        loop.phase(REST, ("wait", 0))
    for row in loop.finish()[2:]:
        assert row.times["backward"] == near(2 * MS)
        assert row.times["optimizer"] == near(1 * MS)
        assert row.times.get("gap_after_rest", 0) == near(0)


def test_a_host_that_is_held_up_by_a_full_queue_charges_the_work_and_not_the_waiting() -> None:
    loop = Loop(SimulatedDevice(depth=16))
    for _ in range(8):
        loop.batch()
        loop.phase(FORWARD, *[("launch", 100 * US)] * 40)
        loop.phase(BACKWARD, *[("launch", 100 * US)] * 80)
        loop.optimizer(("launch", 100 * US))
    for row in loop.finish()[2:]:
        assert row.times["forward"] == near(4 * MS)
        assert row.times["backward"] == near(8 * MS)


def test_a_launch_bound_phase_keeps_the_idleness_between_its_kernels() -> None:
    loop = Loop()
    for _ in range(8):
        loop.batch()
        loop.phase(FORWARD, *[("spend", 30 * US), ("launch", 5 * US)] * 50)
        loop.phase(BACKWARD, ("launch", MS))
        loop.optimizer(("launch", MS), ("wait", 0))
    for row in loop.finish()[2:]:
        assert row.times["forward"] == near(50 * 34 * US)
        assert row.dry["forward"] == near(50 * 34 * US), "at most: what ran there is not known"


def test_a_wait_for_a_copy_in_another_stream_is_charged_to_where_the_loop_waits_for_it() -> None:
    loop = Loop()
    side = Stream("copies")
    for _ in range(8):
        loop.batch()
        loop.phase(COPY)
        loop.device.current = side
        loop.phase(COPY, ("launch", 3 * MS))
        loop.device.current = loop.device.main
        interrupted = loop.recorder.push(COPY)
        loop.device.wait_stream(loop.device.main, side)
        loop.recorder.leave(COPY, interrupted)
        loop.phase(FORWARD, ("launch", MS))
        loop.phase(BACKWARD, ("launch", MS))
        loop.optimizer(("launch", MS), ("wait", 0))
    for row in loop.finish()[2:]:
        assert not row.holes
        assert row.times["copy"] == near(3 * MS)
        assert row.times["forward"] == near(MS)


@pytest.mark.parametrize("slot", ["copy", "communication"])
def test_a_wait_that_the_host_is_done_with_at_once_is_charged_to_where_it_is_called(slot: str) -> None:
    """The collective's `Work.wait()` tells the main stream to wait, in less time than a launch takes."""
    loop = Loop(SimulatedDevice(wait_ns=1 * US, record_ns=1 * US))
    for _ in range(8):
        loop.batch()
        loop.phase(FORWARD, ("launch", MS))
        loop.phase(BACKWARD, ("launch_aside", 5 * MS), ("launch", MS))
        loop.phase(SLOT_OF[slot], ("wait_for_aside", 0))
        loop.optimizer(("launch", MS), ("wait", 0))
    for row in loop.finish()[2:]:
        assert not row.holes
        assert row.times[slot] == near(3 * MS)
        assert row.times["optimizer"] == near(MS)


@pytest.mark.parametrize("slot, more", [("forward", 0), ("communication", 1), ("copy", 1)])
def test_only_what_may_be_a_wait_and_nothing_else_has_an_event_however_short_it_is(
    slot: str, more: int
) -> None:
    recorded = []
    for times in (0, 1):
        loop = Loop(SimulatedDevice(record_ns=1 * US))
        for _ in range(8):
            loop.batch()
            loop.phase(BACKWARD, ("launch", MS))
            for _ in range(times):
                loop.phase(SLOT_OF[slot])
            loop.optimizer(("launch", MS), ("wait", 0))
        recorded.append(loop.device.recorded)
    assert recorded[1] - recorded[0] == more * 7, "it is followed from the first step's end on"


# -- any schedule

PHASES = (COPY, FORWARD, BACKWARD, REST)
Doing = tuple[str, int]
doings: st.SearchStrategy[list[Doing]] = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.integers(2, 3_000).map(lambda us: us * US)),
        st.tuples(st.just("launch_many"), st.integers(1, 60)),
        st.tuples(st.just("launch_aside"), st.integers(2, 3_000).map(lambda us: us * US)),
        st.tuples(st.just("wait_for_aside"), st.just(0)),
        st.tuples(st.just("spend"), st.integers(0, 2_000).map(lambda us: us * US)),
        st.tuples(st.just("wait"), st.just(0)),
    ),
    max_size=4,
)
stalls = st.dictionaries(
    st.sampled_from((DATA_WAIT, *PHASES, OPTIMIZER)), st.integers(1_000, 30_000).map(lambda us: us * US)
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    body=st.fixed_dictionaries(dict.fromkeys((DATA_WAIT, *PHASES, OPTIMIZER), doings)),
    injected=st.lists(stalls, min_size=4, max_size=7),
    depth=st.sampled_from((4, 64, 1_024)),
    drift=st.floats(-5e-5, 5e-5),
    look_every=st.integers(1, 4),
)
def test_every_schedule_is_charged_to_its_causes(
    body: dict[int, list[Doing]],
    injected: list[dict[int, int]],
    depth: int,
    drift: float,
    look_every: int,
) -> None:
    device = SimulatedDevice(depth=depth, drift=drift)
    loop = Loop(device)
    floor = [("launch", 4 * MS)]  # a step lasts several milliseconds, as those do that anybody tunes
    for index, stall in enumerate([{}, {}, *injected]):
        loop.batch(*body[DATA_WAIT], ("spend", stall.get(DATA_WAIT, 0)))
        for slot in PHASES:
            loop.phase(slot, *body[slot], ("spend", stall.get(slot, 0)))
        loop.optimizer(*body[OPTIMIZER], *floor, ("spend", stall.get(OPTIMIZER, 0)))
        if not index % look_every:
            loop.read()
    rows = loop.finish()
    assert [row.step for row in rows] == list(range(1, len(injected) + 2)), "the first begins unseen"
    begin_ns = end_of(device, loop.ends[1])
    for row, ended_ns in zip(rows, loop.ends[2:], strict=True):
        end_ns = end_of(device, ended_ns)
        truth = device.truth(begin_ns, end_ns)
        step_ns = end_ns - begin_ns
        assert not row.holes
        assert row.total_ns == pytest.approx(step_ns, rel=0.002)
        for slot, name in enumerate(SLOTS):
            assert row.times.get(name, 0) == pytest.approx(truth.get(slot, 0), abs=0.02 * step_ns), name
        idle = device.idle(begin_ns, end_ns)
        for slot, name in enumerate(SLOTS):
            assert row.dry.get(name, 0) <= row.times.get(name, 0)
            assert row.dry.get(name, 0) >= idle.get(slot, 0) - 0.02 * step_ns, f"{name} was idle for longer"
        begin_ns = end_ns


def end_of(device: SimulatedDevice, host_ns: int) -> int:
    """When the device came to what the host had launched by then."""
    done_ns = max(
        (end for (begin, end, _), at in zip(device.work, device.launched, strict=True) if at <= host_ns),
        default=0,
    )
    return max(done_ns, host_ns + device.record_ns + device.latency_ns)


# -- what may go wrong


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
