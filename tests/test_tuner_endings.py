"""The script's end and failures of actions: wherever they come, everything is undone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diagnose.core.job import Job
from tests.simulated_job import Change, Machine, controller, lead, train, train_until


@pytest.mark.parametrize("settings", [{}, {"choices": (1, 2, 3)}])
def test_the_end_of_the_script_undoes_everything_wherever_it_comes(settings):
    for steps in range(60, 400, 7):
        machine = Machine(seed=steps)
        actions = [Change(machine, "a", factor=0.5, **settings), Change(machine, "b", factor=0.5)]
        control = controller(machine, actions)
        train(machine, control, steps)
        control.finish()
        assert machine.factors == {}
        for action in actions:
            assert action.calls.count("apply") == action.calls.count("undo")
            assert action.calls.count("prepare") == action.calls.count("unprepare")
        assert machine.stopped == 1


def test_a_trial_cut_off_by_the_end_is_told():
    machine = Machine()
    control = controller(machine, [Change(machine, "slow-to-tell", factor=0.97)])
    train_until(machine, control, "trying")
    train(machine, control, 25)
    control.finish()
    (trial,) = machine.trials()
    assert trial["outcome"] == "cannot_tell"
    assert trial["reason"] == "the script ended after 2 pairs of windows"


@pytest.mark.parametrize("where", ["check", "prepare", "apply", "undo", "unprepare"])
def test_an_error_of_an_action_ends_the_tuning_with_the_others_undone(where):
    machine = Machine()
    fine = Change(machine, "fine", factor=0.5)
    broken = Change(machine, "broken", factor=0.9, fails_on=where)
    control = controller(machine, [fine, broken], [lead("fine", speedup=3.0), lead("broken")])
    train(machine, control, 1000)
    control.finish()
    assert fine.calls.count("apply") == fine.calls.count("undo")
    assert "fine" not in machine.factors
    assert control.state == "ended"
    assert machine.stopped == 1
    assert f"{where} failed" in machine.last("tuning_error")["error"]
    assert control._seeking._attempt is None, "it may keep the weights of before"
    assert all("the script ended" not in trial["reason"] for trial in machine.trials())


class NoEngine(RuntimeError):
    """As a convolution fails for whose workspace there is no memory."""

    def __str__(self) -> str:
        return "GET was unable to find an engine to execute this computation"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, NoEngine])
@pytest.mark.parametrize("where", ["check", "prepare", "apply"])
def test_an_action_for_which_memory_does_not_suffice_is_refused_and_the_others_stay(where, error):
    machine = Machine()
    fine = Change(machine, "fine", factor=0.5)
    large = Change(machine, "large", factor=0.9, fails_on=where, error=error)
    control = controller(machine, [fine, large], [lead("fine", speedup=3.0), lead("large")])
    train(machine, control, 1000)
    assert machine.outcomes() == {"fine": "kept", "large": "refused"}
    assert machine.trials()[-1]["reason"] == "there is too little memory to try it"
    assert machine.factors == {"fine": 0.5}
    assert control.state == "holding"


def test_memory_that_does_not_suffice_for_the_way_back_ends_the_tuning():
    machine = Machine()
    stuck = Change(machine, "stuck", factor=1.5, fails_on="undo", error=torch.OutOfMemoryError)
    control = controller(machine, [stuck])
    train(machine, control, 500)
    assert control.state == "ended"
    assert "undo failed" in machine.last("tuning_error")["error"]


def test_an_action_that_leaves_a_trace_ends_the_tuning():
    machine = Machine()
    train(machine, controller(machine, [Change(machine, "messy", factor=1.5, leaves_trace=True)]), 300)
    assert "Change was not undone: None became 1.5" in machine.last("tuning_error")["error"]


def test_a_model_that_is_gone_at_the_end_is_no_trace_of_an_action():
    machine = Machine()
    action = Change(machine, "good", factor=0.5)
    control = controller(machine, [action])
    control._world.job.models = [torch.nn.Linear(1, 1)]
    train(machine, control, 300)
    control._world.job.models, action.leaves_trace = [], True
    control.finish()
    assert control.state == "ended"
    assert "tuning_error" not in [kind for kind, _ in machine.told]


class SeesAll(Change):
    """An action whose state shows what others change, too: several work on the same loader, or model."""

    def state(self, job: Job) -> Any:
        return dict(self.machine.factors)


def test_what_other_actions_change_is_no_trace_of_one_that_goes_before_them():
    """The script ends at any step: while settings are halved, in a trial, while all is off for a while."""
    for steps in range(60, 700, 9):
        machine = Machine(seed=steps)
        actions = [
            SeesAll(machine, "knob", choices=(1, 2), factor_of={1: 0.9, 2: 0.5}),
            SeesAll(machine, "other", factor=0.6),
        ]
        control = controller(machine, actions)
        train(machine, control, steps)
        control.finish()
        assert machine.factors == {}
        assert "tuning_error" not in [kind for kind, _ in machine.told]


def test_one_that_gives_itself_up_goes_from_between_two_others():
    machine = Machine(seed=2)
    tired, fine = SeesAll(machine, "tired", factor=0.6), SeesAll(machine, "fine", factor=0.6)
    control = controller(machine, [tired, fine])
    train_until(machine, control, "holding")
    assert list(machine.factors) == ["tired", "fine"]
    tired.gives_up = "the script changed its dataset"
    train(machine, control, 3_000)
    control.finish()
    assert machine.last("dropped")["action"] == "tired"
    assert "tuning_error" not in [kind for kind, _ in machine.told]
