"""What a change costs once, against what is left of the run; and what must go again after a while."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from diagnose.core.job import Job
from diagnose.tuner.controller import Controller
from diagnose.tuner.policy import Policy
from tests.test_tuner import Change, Machine, controller, lead, train


@dataclass
class Dear(Change):
    """An action that takes seconds to start, and may find that it must go."""

    start_s: float = 0.0
    must_go: str = ""

    def start_up_s(self, job: Job) -> float:
        return self.start_s

    def why_not_stay(self, prepared: Any) -> str:
        return self.must_go


def tuned(machine: Machine, action: Dear, left: int | None, **more: Any) -> Controller:
    control = controller(machine, [action], [lead("dear", speedup=1.25)], **more)
    control._world.job.steps_left = lambda: left
    return control


def test_what_costs_more_than_the_rest_of_the_run_could_win_is_not_tried():
    """1000 steps of 20 ms, a fifth of which can be won: 4 s."""
    machine = Machine(memory=0.0, spread=0.01)
    action = Dear(machine, "dear", start_s=20.0)
    train(machine, tuned(machine, action, left=1000), 300)
    (trial,) = machine.trials()
    assert trial["outcome"] == "refused"
    assert trial["reason"].startswith("starting it takes about 20 s, and it could win 4.")
    assert trial["reason"].endswith(" s in about 1000 steps that are left")
    assert action.calls == ["check"]


@pytest.mark.parametrize("left", [None, 100_000])
def test_it_is_tried_where_the_run_is_long_or_nobody_knows_how_long(left):
    machine = Machine()
    action = Dear(machine, "dear", factor=0.5, start_s=20.0)
    train(machine, tuned(machine, action, left), 400)
    assert machine.outcomes() == {"dear": "kept"}


def test_of_what_nothing_is_predicted_only_a_cost_beyond_all_that_is_left_refuses():
    machine = Machine(memory=0.0, spread=0.01)
    action = Dear(machine, "dear", start_s=20.0)
    control = controller(machine, [action], [], policy=Policy(only=frozenset({"dear"})))
    control._world.job.steps_left = lambda: 500
    train(machine, control, 300)
    assert machine.outcomes() == {"dear": "refused"}


def test_what_finds_in_its_trial_that_it_must_go_is_undone_with_its_reason():
    machine = Machine()
    action = Dear(machine, "dear", factor=0.5, must_go="it compiles again and again")
    train(machine, tuned(machine, action, None), 300)
    (trial,) = machine.trials()
    assert (trial["outcome"], trial["reason"]) == ("refused", "it compiles again and again")
    assert machine.factors == {}


def test_what_finds_so_while_it_is_kept_is_dropped_with_its_reason():
    machine = Machine()
    action = Dear(machine, "dear", factor=0.5)
    control = tuned(machine, action, None)
    train(machine, control, 600)
    assert set(machine.factors) == {"dear"}
    action.must_go = "it compiles again and again"
    train(machine, control, 300)
    assert machine.factors == {}
    assert machine.last("dropped") == {"action": "dear", "reason": "it compiles again and again"}
