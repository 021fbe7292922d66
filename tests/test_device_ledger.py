"""The ledger by the device's clock: work where it was launched, idleness to what the host did meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diagnose.core.ledger import SLOT_OF, SLOTS
from tests.simulated_device import MS, US, SimulatedDevice, Stream
from tests.simulated_loop import BACKWARD, COPY, DATA_WAIT, FORWARD, OPTIMIZER, REST, Loop, near

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
