"""Windows of steps on a simulated job, and what pairs of them tell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.paired import PairedTest, Verdict, t_point, window_mean
from diagnose.tuner.policy import Policy
from tests.simulated_job import MS, Change, Machine, controller, train

AHEAD, LAUNCH_NS = 17, MS
"""A loop that reads nothing from its GPU was so many steps ahead of it."""


@dataclass
class Device(Machine):
    """A machine whose steps only give a device work, until too much of it waits."""

    done: list[int] = field(default_factory=lambda: [0] * AHEAD)
    synchronized: list[tuple[int, ...]] = field(default_factory=list)

    def step_ns(self) -> int:
        begins = max(self.done[-1], self.now + LAUNCH_NS)
        self.done.append(begins + super().step_ns())
        return max(LAUNCH_NS, self.done[-AHEAD] - self.now)

    def synchronize(self) -> None:
        if self.now < self.done[-1]:
            self.synchronized.append(tuple(self.factors))
        self.now = max(self.now, self.done[-1])


@pytest.mark.parametrize("factor", [0.6, 1.4])
def test_the_time_of_a_window_is_that_of_its_own_work_on_the_device(factor):
    machine = Device(seed=1, spread=0.03, memory=0.05)
    control = controller(machine, [Change(machine, "one", factor)], synchronize=machine.synchronize)
    while not machine.trials():
        train(machine, control, 1)
    (trial,) = machine.trials()
    measured = trial["measured"]
    assert measured["speedup"] == pytest.approx(1 / factor, rel=0.1)
    assert trial["outcome"] == ("kept" if factor < 1 else "reverted")
    on, off = (machine.synchronized.count(each) for each in (("one",), ()))
    assert min(on, off) > measured["pairs"]
    assert abs(on - off) <= 2, "it costs the same in either state, once it has begun"


class Noting(Machine):
    """A machine that also notes when steps end."""

    order: list[str]

    def step_ns(self) -> int:
        self.order.append("step")
        return super().step_ns()


def test_the_device_is_waited_for_before_anything_is_done_and_afterwards():
    machine, order = Noting(), list[str]()
    machine.order = order
    one = Change(machine, "one", 0.5, Safety.PRECISION, touches="model", calls=order)

    def snapshot(job: Job) -> Any:
        order.append("snapshot")

    control = controller(
        machine,
        [one],
        policy=Policy(allowed=frozenset({Safety.PRECISION})),
        synchronize=lambda: order.append("synchronize"),
        snapshot=snapshot,
    )
    while not machine.trials():
        train(machine, control, 1)
    between = [
        [what for what in calls.split() if what != "check"] for calls in " ".join(order).split("step")
    ]
    done = [calls for calls in between if set(calls) != {"synchronize"} and calls]
    assert set().union(*done) == {"synchronize", "prepare", "apply", "undo", "snapshot"}
    assert all(calls[0] == calls[-1] == "synchronize" for calls in done), done


def test_steps_that_evaluate_are_left_out_of_windows():
    machine = Machine(memory=0.0, spread=0.01)
    control = controller(machine, [Change(machine, "null")])
    for number in range(600):
        evaluates = number % 7 == 0
        machine.now += machine.step_ns() * (40 if evaluates else 1)
        control.boundary(number + 1, aside=evaluates)
    measured = machine.trials()[0]["measured"]
    assert measured["without_ns"] < 1.5 * machine.base_ns


def test_windows_span_whole_epochs_where_these_are_short():
    """Sixteen steps of 4 ms, the first of which takes 40 ms more for its workers, or 20 with the change."""
    machine = Machine()
    quicker_start = Change(machine, "quicker-start", window_steps=20, settle_steps=17)
    control = controller(machine, [quicker_start])
    control._world.job.epoch_steps = 16
    for number in range(1500):
        begins = number % 16 == 0
        machine.now += 4 * MS + begins * (20 if machine.factors else 40) * MS
        control.boundary(number + 1, aside=False, begins=begins)
    measured = machine.trials()[0]["measured"]
    assert measured["without_ns"] == (16 * 4 + 40) * MS / 16
    assert measured["with_ns"] == (16 * 4 + 20) * MS / 16


def test_the_t_points_are_those_of_the_tables():
    table = {
        (0.975, 1): 12.706,
        (0.975, 5): 2.571,
        (0.9975, 3): 7.453,
        (0.9975, 10): 3.581,
        (0.975, 30): 2.042,
    }
    for (probability, degrees), point in table.items():
        assert t_point(probability, degrees) == pytest.approx(point, abs=0.001)


def test_one_pause_does_not_decide_a_window():
    assert window_mean([10.0, 10.0, 10.0, 10.0, 1000.0]) == pytest.approx(16.0)


def test_waits_for_workers_that_deliver_in_bursts_count_as_long_as_they_take():
    burst = [10.0, 10.0, 10.0, 170.0]
    assert window_mean(5 * burst) == pytest.approx(50.0)
    assert window_mean(burst) == pytest.approx(17.5), "one of so few may be a pause"


def test_pairs_without_spread_tell_at_the_first_look():
    test = PairedTest()
    for _ in range(4):
        assert test.verdict() is None
        test.add(110.0, 100.0)
    assert test.verdict() is Verdict.FASTER


def test_two_pairs_that_have_nothing_in_common_are_measured_all_the_same():
    test = PairedTest()
    test.add(100.0, 10_000.0)
    test.add(10_000.0, 100.0)
    measured = test.measured()
    assert measured.speedup == pytest.approx(1.0)
    assert (measured.low, measured.high, measured.detectable) == pytest.approx((0.001, 1000.0, 1000.0))
