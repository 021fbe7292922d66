"""An action in the place of a kept one that it excludes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from diagnose.tuner.controller import Controller
from tests.simulated_job import Exclusive, Machine, controller, lead, train, train_until


def two_that_exclude_each_other(
    machine: Machine, speedup: float = 1.5, **of_the_other: Any
) -> tuple[Controller, Exclusive, Exclusive]:
    """One makes steps half as long, and is tried first; the other is expected to win more, or not."""
    one = Exclusive(machine, "one", factor=0.5, excludes=frozenset({"other"}))
    other = Exclusive(machine, "other", excludes=frozenset({"one"}), **of_the_other)
    leads = [lead("one", speedup=3.0), lead("other", speedup=speedup)]
    return controller(machine, [one, other], leads), one, other


def test_what_is_kept_makes_way_only_for_what_is_expected_to_win_clearly_more():
    machine = Machine()
    control, _, other = two_that_exclude_each_other(machine, speedup=1.05, factor=0.2)
    train(machine, control, 800)
    assert machine.outcomes() == {"one": "kept"}
    assert other.calls == []


def test_a_better_action_takes_the_place_of_a_kept_one_that_it_excludes():
    machine = Machine(seed=1)
    control, one, other = two_that_exclude_each_other(machine, factor=0.2)
    train_until(machine, control, "holding")
    assert machine.outcomes() == {"one": "kept", "other": "kept"}
    assert machine.factors == {"other": 0.2}
    assert one.calls.count("prepare") == one.calls.count("unprepare") == 1
    trial = machine.trials()[1]
    assert trial["measured"]["low"] <= 0.5 / 0.2 <= trial["measured"]["high"], "against the one, not alone"
    assert trial["reason"] == "measured in the place of one"
    told = machine.last("dropped")
    assert told["action"] == "one"
    assert told["reason"].startswith("other took its place: 2.")
    assert machine.last("confirmation")["speedup"] == pytest.approx(5.0, rel=0.3)
    control.finish()
    assert machine.factors == {}
    assert other.calls.count("prepare") == other.calls.count("unprepare") == 1


@pytest.mark.parametrize(
    "of_the_other, outcome",
    [
        ({"factor": 0.8}, "reverted"),
        ({"refuses": "there is no room"}, "refused"),
        ({"gives_up": "there is no room left"}, "refused"),
    ],
)
def test_what_is_kept_comes_back_where_the_other_does_not_win(of_the_other, outcome):
    machine = Machine()
    control, _, _ = two_that_exclude_each_other(machine, **of_the_other)
    train_until(machine, control, "holding")
    assert machine.outcomes() == {"one": "kept", "other": outcome}
    assert machine.factors == {"one": 0.5}
    assert "dropped" not in [kind for kind, _ in machine.told]


def test_what_is_kept_stays_in_force_while_it_is_too_early_for_the_other():
    machine = Machine()
    control, one, other = two_that_exclude_each_other(machine, factor=0.2, not_before=700)
    train(machine, control, 650)
    assert machine.outcomes() == {"one": "kept"}
    assert one.calls.count("unprepare") == other.calls.count("prepare") == 0
    train(machine, control, 600)
    assert machine.outcomes() == {"one": "kept", "other": "kept"}


@pytest.mark.parametrize(
    "speedup, outcomes", [(8.0, {"one": "kept", "other": "kept"}), (2.1, {"one": "kept"})]
)
def test_what_it_was_too_early_for_is_tried_in_the_place_of_what_has_won_less_than_it_is_to_win(
    speedup, outcomes
):
    """The rules do not lead to it again: what it would cure is gone in part."""
    machine = Machine()
    one = Exclusive(machine, "one", factor=0.5, excludes=frozenset({"other"}))
    other = Exclusive(machine, "other", factor=0.1, not_before=300)
    leads = [lead("one", "other", speedup=speedup)]
    leads[0] = replace(leads[0], gains={"one": replace(leads[0].gain, speedup=2.0)})
    control = controller(machine, [one, other], leads, again=[])
    train(machine, control, 1500)
    control.finish()
    told = {trial["action"]: trial["outcome"] for trial in machine.trials()}
    assert {name: told[name] for name in outcomes} == outcomes
    assert ("prepare" in other.calls) is ("other" in outcomes)
    if "other" in outcomes:
        assert machine.trials()[-1]["predicted"]["speedup"] == pytest.approx(8.0 / 2.0, rel=0.3)


def test_what_is_kept_does_not_make_way_for_what_takes_longer_to_be_ready_than_it_could_win():
    machine = Machine()
    control, _, other = two_that_exclude_each_other(machine, factor=0.2, settle_steps=1000)
    control._world.job.steps_left = lambda: 2000
    train(machine, control, 1200)
    assert not {"prepare", "apply"} & {*other.calls}
    assert machine.factors == {"one": 0.5}
    control.finish()
    assert machine.outcomes() == {"one": "kept", "other": "refused"}
    assert machine.trials()[1]["reason"].startswith("to try it the job does without one for a while")


def test_it_does_when_the_run_has_turned_out_to_be_long_enough():
    machine = Machine()
    control, _, _ = two_that_exclude_each_other(machine, factor=0.2, settle_steps=400)
    train(machine, control, 3000)
    assert machine.outcomes() == {"one": "kept"}
    train(machine, control, 5000)
    assert machine.outcomes() == {"one": "kept", "other": "kept"}


def test_the_end_of_the_script_undoes_both_wherever_it_comes():
    for steps in range(200, 420, 3):
        machine = Machine(seed=steps)
        control, *actions = two_that_exclude_each_other(machine, factor=0.3)
        train(machine, control, steps)
        control.finish()
        assert machine.factors == {}
        assert "tuning_error" not in [kind for kind, _ in machine.told]
        for action in actions:
            assert action.calls.count("apply") == action.calls.count("undo")
            assert action.calls.count("prepare") == action.calls.count("unprepare")


@pytest.mark.parametrize("where", ["check", "prepare", "apply", "undo", "unprepare"])
def test_an_error_of_the_other_undoes_both(where):
    machine = Machine()
    control, one, _ = two_that_exclude_each_other(machine, factor=0.3, fails_on=where)
    train(machine, control, 1000)
    control.finish()
    assert "one" not in machine.factors
    assert one.calls.count("apply") == one.calls.count("undo")
    assert control.state == "ended"
    assert f"{where} failed" in machine.last("tuning_error")["error"]


def test_the_one_in_force_comes_back_where_memory_does_not_suffice_for_the_other():
    machine, error = Machine(), torch.OutOfMemoryError
    control, one, _ = two_that_exclude_each_other(machine, factor=0.3, fails_on="apply", error=error)
    train(machine, control, 1000)
    assert machine.outcomes()["other"] == "refused"
    assert machine.factors == {"one": one.factor}
    assert control.state == "holding"


def test_a_kept_one_that_gives_itself_up_while_another_is_set_against_it_is_dropped():
    machine = Machine()
    control, one, other = two_that_exclude_each_other(machine, factor=0.45)
    while "apply" not in other.calls:
        train(machine, control, 1)
    one.gives_up = "the script changed its dataset"
    train(machine, control, 100)
    assert machine.factors == {}
    assert machine.last("dropped") == {"action": "one", "reason": "the script changed its dataset"}
    train(machine, control, 1500)
    assert machine.factors == {"other": 0.45}, "it was not to blame"
    assert "tuning_error" not in [kind for kind, _ in machine.told]
