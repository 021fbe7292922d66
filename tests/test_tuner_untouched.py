"""A gain is of the script's own steps, whatever an action that is only prepared does to them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.policy import Policy
from tests.simulated_job import MS, Change, Machine, controller, lead, train, train_until


@dataclass
class Slowing(Change):
    """An action with which steps take `slowed` times as long, once it is prepared and not in force."""

    slowed: float = 8.0

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        self.machine.factors["prepared"] = self.slowed
        with super().prepare(job, value):
            yield value
        del self.machine.factors["prepared"]


def calm(**more: Any) -> Machine:
    return Machine(spread=0.01, memory=0.0, **more)


def test_a_gain_over_what_preparing_costs_is_not_believed():
    machine = calm()
    action = Slowing(machine, "cache", factor=1.3 / 8)
    train(machine, controller(machine, [action]), 1000)
    trial = machine.trials()[0]
    assert trial["outcome"] == "cannot_tell"
    assert trial["measured"] is None
    assert trial["reason"].endswith("with nothing of it prepared: its gain is over what preparing it costs")
    assert machine.factors == {}
    assert "confirmation" not in [kind for kind, _ in machine.told]


def test_what_is_kept_is_reported_against_untouched_steps():
    machine = calm()
    action = Slowing(machine, "cache", factor=0.5 / 8)
    train(machine, controller(machine, [action]), 1000)
    trial, confirmation = machine.trials()[0], machine.last("confirmation")
    assert trial["outcome"] == "kept"
    for measured in (trial["measured"], confirmation):
        assert measured["speedup"] == pytest.approx(2.0, rel=0.15)
        assert measured["without_ns"] == pytest.approx(20 * MS, rel=0.15)
    assert machine.factors == {"prepared": 8.0, "cache": 0.5 / 8}


@pytest.mark.parametrize(("slowed", "outcome", "prepared"), [(1.0, "kept", 1), (1.15, "cannot_tell", 1)])
def test_that_each_step_of_a_trial_is_looked_at_is_no_cost_of_preparing(slowed, outcome, prepared):
    """A gain of 6 % of a millisecond, which a look at each outweighs; and one over what preparing costs."""
    machine = calm(base_ns=1 * MS, look_ns=80_000)
    action = Slowing(machine, "small", factor=0.94, slowed=slowed)
    train(machine, controller(machine, [action]), 8_000)
    assert machine.outcomes() == {"small": outcome}
    assert action.calls.count("prepare") == prepared


def test_it_counts_once_where_each_step_before_the_trial_was_looked_at_too():
    """As the loss was watched: 15 % for preparing, of which 9 % are won back."""
    machine = calm(base_ns=1 * MS, look_ns=80_000)
    action = Slowing(machine, "small", factor=0.91, slowed=1.15)
    policy = Policy(allowed=frozenset({Safety.PRECISION}))
    train(machine, controller(machine, [action], policy=policy), 8_000)
    assert machine.outcomes() == {"small": "cannot_tell"}


def test_nor_is_it_one_where_the_steps_before_are_known_from_a_trial_alone():
    machine = calm(base_ns=2 * MS, look_ns=80_000)
    great = Change(machine, "great", factor=0.5)
    action = Slowing(machine, "small", factor=0.905, slowed=1.15)
    control = controller(machine, [great, action], [lead("great", speedup=2.0), lead("small", speedup=1.1)])
    control._asking.pays = lambda: False  # type: ignore[method-assign]  # nor are steps observed again
    train(machine, control, 8_000)
    assert machine.outcomes() == {"great": "kept", "small": "cannot_tell"}


@pytest.mark.parametrize(("slower", "prepared"), [(2.0, 2), (1.0, 1)])
def test_where_the_machine_became_slower_untouched_steps_are_looked_at_again(slower: float, prepared: int):
    """The gain is believed, and is the one of the trial."""
    machine = calm()
    action = Change(machine, "good", factor=0.8)
    control = controller(machine, [action], policy=Policy(only=("good",)))
    train_until(machine, control, "trying")
    machine.base_ns *= slower
    train(machine, control, 1000)
    assert machine.outcomes() == {"good": "kept"}
    assert action.calls.count("prepare") == prepared
    assert machine.last("confirmation")["speedup"] == pytest.approx(1.25, rel=0.1)
