"""What is kept is measured now and again, and undone where it comes to cost."""

from __future__ import annotations

import math

from diagnose.tuner.kept import Kept
from tests.simulated_job import Change, Machine, controller, train, train_until


def test_what_was_kept_is_undone_when_it_comes_to_cost():
    machine = Machine(seed=2)
    action = Change(machine, "fickle", factor=0.6)
    control = controller(machine, [action])
    train(machine, control, 500)
    assert machine.factors == {"fickle": 0.6}
    action.factor = machine.factors["fickle"] = 1.5
    train(machine, control, 1200)
    assert machine.factors == {}
    assert "slower" in machine.last("undone")["reason"]


def test_a_true_gain_of_a_twentieth_stays_however_often_it_is_measured():
    undone = 0
    for seed in range(40):
        machine = Machine(seed=seed)
        control = controller(machine, [Change(machine, "good", factor=0.95)], reuse=[Kept(action="good")])
        train(machine, control, 8_000)
        undone += not machine.factors
    assert undone <= 1


def test_what_won_its_trial_and_costs_a_twentieth_afterwards_is_undone():
    at_once = later = 0
    for seed in range(40):
        machine = Machine(seed=seed)
        action = Change(machine, "fickle", factor=0.7)
        control = controller(machine, [action])
        train_until(machine, control, "confirming")
        assert machine.factors == {}, "it is measured without the change first"
        action.factor = 1.05
        while control.state == "confirming":
            train(machine, control, 1)
        at_once += not machine.factors
        train(machine, control, 4_000)
        later += not machine.factors
    assert at_once >= 18
    assert later >= 37


def test_two_pairs_that_agree_by_chance_undo_nothing():
    class Even(Machine):
        def step_ns(self) -> int:
            return int(self.base_ns * math.prod(self.factors.values()))

    machine = Even()
    action = Change(machine, "fickle", factor=0.6)
    control = controller(machine, [action])
    train(machine, control, 500)
    action.factor = machine.factors["fickle"] = 1.01
    train(machine, control, 1200)
    assert machine.last("recheck")["high"] < 1
    assert machine.factors == {"fickle": 1.01}


def test_what_must_be_there_from_the_start_stays_where_the_others_come_to_cost():
    machine = Machine(seed=2)
    first, action = Change(machine, "first", at_start=True), Change(machine, "fickle", factor=0.6)
    control = controller(machine, [first, action], reuse=[Kept(action="first"), Kept(action="fickle")])
    train(machine, control, 500)
    action.factor = machine.factors["fickle"] = 1.5
    train(machine, control, 1200)
    assert machine.factors == {"first": 1.0}
    assert "slower" in machine.last("dropped")["reason"]
    assert "undone" not in [kind for kind, _ in machine.told]


def test_a_kept_action_that_gives_itself_up_is_dropped_and_the_others_stay():
    machine = Machine(seed=2)
    tired, fine = Change(machine, "tired", factor=0.6), Change(machine, "fine", factor=0.6)
    control = controller(machine, [tired, fine])
    train_until(machine, control, "holding")
    assert set(machine.factors) == {"tired", "fine"}
    tired.gives_up = "the script changed its dataset"
    train(machine, control, 3_000)
    assert set(machine.factors) == {"fine"}
    assert machine.last("dropped") == {"action": "tired", "reason": "the script changed its dataset"}
    assert control.state == "holding"
