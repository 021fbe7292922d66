"""What an earlier run has kept is put in force without trials (`--apply`)."""

from __future__ import annotations

import pytest
from torch import nn

from diagnose.report._tuning_words import verdict
from diagnose.tuner.kept import Kept
from tests.simulated_job import Change, Machine, Settled, controller, train, train_until
from tests.test_tuner_commands import told_by
from tests.test_tuner_over import Hung


def test_a_file_of_settings_is_put_in_force_at_once_and_confirmed():
    machine = Machine()
    good = Change(machine, "good", factor_of={4: 0.5})
    control = controller(machine, [good], reuse=[Kept(action="good", value=4), Kept(action="gone")])
    train(machine, control, 200)
    assert machine.outcomes() == {"good": "kept", "gone": "refused"}
    assert machine.last("confirmation")["speedup"] == pytest.approx(2.0, rel=0.2)
    assert machine.factors == {"good": 0.5}


def test_what_must_be_there_from_the_start_is_there_before_the_first_step_and_is_not_measured():
    machine = Machine()
    first = Change(machine, "first", at_start=True, touches="model")
    good = Change(machine, "good", factor=0.5)
    control = controller(machine, [first, good], reuse=[Kept(action="good"), Kept(action="first")])
    assert machine.factors == {"first": 1.0}
    train(machine, control, 800)
    assert machine.outcomes() == {"first": "kept", "good": "kept"}
    assert machine.last("confirmation")["speedup"] == pytest.approx(2.0, rel=0.2)
    assert first.calls.count("apply") == 1, "off and on again would measure nothing"
    control.finish()
    assert machine.factors == {}


def test_what_must_be_there_from_the_start_stays_to_the_end_where_it_is_alone():
    machine = Machine()
    first = Change(machine, "first", at_start=True)
    control = controller(machine, [first], reuse=[Kept(action="first")])
    train(machine, control, 800)
    assert (machine.factors, control.state) == ({"first": 1.0}, "holding")
    assert "confirmation" not in [kind for kind, _ in machine.told]


def test_what_frees_memory_stays_where_a_file_names_it():
    machine = Machine()
    saver = Change(machine, "saver", factor=1.3, frees_memory=True)
    control = controller(machine, [saver], reuse=[Kept(action="saver")])
    train(machine, control, 2000)
    assert machine.factors == {"saver": 1.3}


def test_a_setting_for_which_it_is_too_early_is_put_in_force_later_and_confirmed_with_the_others():
    machine = Machine()
    first, late = Change(machine, "first", factor=0.8), Change(machine, "late", factor=0.5, not_before=150)
    control = controller(machine, [first, late], reuse=[Kept(action="late"), Kept(action="first")])
    train(machine, control, 100)
    assert machine.factors == {"first": 0.8}
    train(machine, control, 500)
    assert machine.outcomes() == {"first": "kept", "late": "kept"}
    assert machine.factors == {"first": 0.8, "late": 0.5}
    assert machine.last("confirmation")["speedup"] == pytest.approx(2.5, rel=0.2)


def test_a_setting_for_which_it_stayed_too_early_says_so():
    machine = Machine()
    control = controller(machine, [Change(machine, "late", not_before=10**9)], reuse=[Kept(action="late")])
    train(machine, control, 300)
    control.finish()
    (trial,) = machine.trials()
    assert (trial["outcome"], trial["reason"]) == ("refused", "it is too early")


def test_a_file_that_names_actions_which_exclude_each_other_gets_the_first():
    machine = Machine()
    one = Change(machine, "one", factor=0.5)
    other = Change(machine, "other", factor=0.5, excludes=frozenset({"one"}))
    train(machine, controller(machine, [one, other], reuse=[Kept(action="one"), Kept(action="other")]), 50)
    assert machine.outcomes() == {"one": "kept", "other": "refused"}
    assert machine.trials()[1]["reason"] == "it cannot be in force together with one"


def test_what_a_file_puts_in_force_has_its_settings_too():
    machine = Machine()
    good = Settled(machine, "good", factor=0.5)
    other = Settled(machine, "other", refuses="there is none")
    reuse = [Kept(action="good", value=4), Kept(action="other")]
    train(machine, controller(machine, [good, other], reuse=reuse), 200)
    assert [trial["settings"] for trial in machine.trials()] == [{"Loader.size": "4"}, {}]


def test_a_file_without_the_value_that_an_action_needs_gets_the_others():
    machine = Machine()
    good, sized = Change(machine, "good", factor=0.5), Change(machine, "sized", choices=(4, 8))
    reuse = [Kept(action="good"), Kept(action="sized")]
    train(machine, controller(machine, [good, sized], reuse=reuse), 200)
    assert machine.outcomes() == {"good": "kept", "sized": "refused"}
    assert machine.trials()[1]["reason"] == "it needs a value, such as 4"
    assert machine.factors == {"good": 0.5}


def test_what_is_trained_next_gets_what_the_file_names_too_and_is_not_taken_out_to_be_confirmed():
    machine = Machine(seed=2)
    hung, fine = Hung(machine, "hung", factor=0.5), Change(machine, "fine", factor=0.8)
    control = controller(machine, [hung, fine], reuse=[Kept(action="hung"), Kept(action="fine")])
    job = control._world.job
    job.models = [nn.Linear(2, 1)]
    train(machine, control, 300)
    assert control.state == "holding"
    before = verdict(told_by(machine))
    assert before.endswith("with 2 fixes, confirmed on against off")
    for _ in range(3):
        job.models = []
        train(machine, control, 250)
        assert machine.factors == {"fine": 0.8}
        applied = fine.calls.count("apply")
        job.models = [nn.Linear(2, 1)]
        train(machine, control, 120)
        assert machine.factors == {"fine": 0.8, "hung": 0.5}
        assert fine.calls.count("apply") <= applied + 1, "no more than one measurement that was due"
    assert [kind for kind, _ in machine.told].count("confirmation") == 1
    assert verdict(told_by(machine)) == before
    assert [trial.action for trial in told_by(machine).trials] == ["hung", "fine"]


def test_it_is_confirmed_later_where_the_first_model_went_before_that():
    machine = Machine(seed=2)
    control = controller(machine, [Hung(machine, "hung", factor=0.5)], reuse=[Kept(action="hung")])
    job = control._world.job
    job.models = [nn.Linear(2, 1)]
    train_until(machine, control, "confirming")
    train(machine, control, 10)
    job.models = [nn.Linear(2, 1)]
    train(machine, control, 500)
    assert machine.factors == {"hung": 0.5}
    assert machine.last("confirmation")["speedup"] == pytest.approx(2.0, rel=0.2)
    assert verdict(told_by(machine)).endswith("with 1 fix, confirmed on against off")
