"""Passes beside the training tell what an action would win that no rule speaks of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.installed import Installed
from diagnose.tuner.policy import Policy
from tests.simulated_job import MS, Change, Machine, controller, lead, train

TimePasses = Callable[[Job, Installed], tuple[int, int] | None]


def passes(machine: Machine, share: float = 0.9) -> TimePasses:
    """Passes that are this part of a step, and become shorter as the step does."""

    def timed(job: Job, installed: Installed) -> tuple[int, int]:
        action: Any = installed.action
        without = share * machine.base_ns
        factor = action.factor_of.get(installed.value, action.factor)
        return int(without), int(without - machine.base_ns * (1 - factor))

    return timed


def trained(
    machine: Machine, *changes: Change, time_passes: TimePasses, leads: Any = (), **more: Any
) -> None:
    train(machine, controller(machine, changes, list(leads), time_passes=time_passes, **more), 6000)


def test_what_passes_say_is_tried_before_what_is_to_win_less():
    machine = Machine(spread=0.02)
    trained(
        machine,
        Change(machine, "little", factor=0.95),
        Change(machine, "layout", factor=0.7, touches="model", unasked=True),
        leads=[lead("little", speedup=1.05)],
        time_passes=passes(machine),
    )
    first, second = machine.trials()[:2]
    assert (first["action"], second["action"]) == ("layout", "little")
    assert first["outcome"] == "kept"
    assert first["predicted"]["speedup"] == pytest.approx(1 / 0.7, rel=0.01)
    assert first["predicted"]["low"] < first["measured"]["speedup"] < first["predicted"]["high"]


def test_what_makes_passes_longer_gets_no_trial_and_the_report_says_why():
    machine = Machine()
    trained(
        machine,
        Change(machine, "layout", factor=1.5, touches="model", unasked=True),
        time_passes=passes(machine),
    )
    (trial,) = machine.trials()
    assert (trial["outcome"], trial["steps_spent"]) == ("refused", 0)
    assert trial["reason"] == "a pass beside the training takes 28.0 ms with it, and 18.0 ms without"
    assert "layout" not in machine.factors


def test_the_setting_that_wins_most_counts():
    machine = Machine(spread=0.02)
    threads = Change(
        machine, "threads", touches="model", unasked=True, choices=(1, 4), factor_of={1: 1.8, 4: 0.6}
    )
    trained(machine, threads, time_passes=passes(machine))
    (trial,) = machine.trials()
    assert (trial["outcome"], trial["value"]) == ("kept", 4)


@pytest.mark.parametrize(
    ("told", "predicted"), [(None, None), ((18 * MS, 18 * MS), None), ((18 * MS, 10 * MS), 20 / 12)]
)
def test_where_passes_do_not_tell_the_trial_must(told: Any, predicted: float | None):
    machine = Machine(spread=0.02)
    layout = Change(machine, "layout", factor=0.6, touches="model", unasked=True)
    trained(machine, layout, time_passes=lambda job, installed: told)
    (trial,) = machine.trials()
    assert trial["outcome"] == "kept"
    assert trial["predicted"] == predicted or trial["predicted"]["speedup"] == pytest.approx(
        predicted, rel=0.05
    )


@pytest.mark.parametrize(
    ("touches", "safety", "policy", "left"),
    [
        ("nothing", Safety.ROUNDING, Policy(), None),
        ("model", Safety.PRECISION, Policy(), None),
        ("model", Safety.ROUNDING, Policy(dry_run=True), None),
        ("model", Safety.ROUNDING, Policy(skip=frozenset({"layout"})), None),
        ("model", Safety.ROUNDING, Policy(), 100),
    ],
)
def test_nothing_is_looked_into_that_may_not_or_need_not_be(
    touches: str, safety: Safety, policy: Policy, left: int | None
):
    machine, asked = Machine(), []
    layout = Change(machine, "layout", factor=0.6, touches=touches, safety=safety, unasked=True)

    def note(job: Job, installed: Installed) -> None:
        asked.append(installed.name)

    control = controller(machine, [layout], [], policy=policy, time_passes=note)
    control._world.job.steps_left = lambda: left
    train(machine, control, 400)
    assert not asked


def test_what_fails_while_passes_are_timed_is_taken_out_and_ends_the_tuning():
    machine = Machine()

    def fail(job: Job, installed: Installed) -> None:
        raise OSError("no clock")

    layout = Change(machine, "layout", factor=0.6, touches="model", unasked=True)
    control = controller(machine, [layout], [], time_passes=fail)
    train(machine, control, 400)
    assert control.state == "ended"
    assert "no clock" in machine.last("tuning_error")["error"]
    assert layout.calls[-1] == "unprepare"
