"""When the rules are asked, what that may cost, and what is tried only later."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from diagnose.tuner.controller import Controller
from diagnose.tuner.policy import Lead, Policy
from diagnose.tuner.question import Question
from tests.simulated_job import MS, Change, Found, Machine, controller, lead, train


def test_it_is_told_when_the_rules_have_been_asked():
    machine = Machine()
    control = controller(machine, [], [])
    train(machine, control, 20)
    assert "diagnosed" not in [kind for kind, _ in machine.told]
    train(machine, control, 200)
    assert "diagnosed" in [kind for kind, _ in machine.told]


def test_what_cannot_be_tried_yet_is_tried_when_it_can():
    machine = Machine()
    control = controller(machine, [Change(machine, "early", factor=0.5, not_before=700)])
    train(machine, control, 650)
    assert machine.trials() == []
    train(machine, control, 400)
    assert machine.outcomes() == {"early": "kept"}


def test_what_could_not_be_tried_to_the_end_is_refused_with_its_reason():
    machine = Machine()
    actions = [Change(machine, "good", factor=0.5), Change(machine, "early", not_before=10**9)]
    control = controller(machine, actions)
    train(machine, control, 900)
    control.finish()
    assert machine.outcomes() == {"good": "kept", "early": "refused"}
    assert machine.trials()[-1]["reason"] == "it is too early"


def test_what_comes_to_be_wrong_while_something_is_kept_is_found():
    machine = Machine()
    actions = [Change(machine, "first", factor=0.5), Change(machine, "second", factor=0.5)]
    leads = [lead("first")]
    control = controller(machine, actions, leads)
    train(machine, control, 2000)
    leads.append(lead("second"))
    train(machine, control, 3500)
    assert machine.outcomes() == {"first": "kept", "second": "kept"}
    assert [kind for kind, _ in machine.told].count("confirmation") == 2


def test_a_fault_that_shows_late_is_found_late():
    machine = Machine()
    found: list[Lead] = []
    control = controller(machine, [Change(machine, "late", factor=0.5)], found)
    train(machine, control, 150)
    assert machine.trials() == []
    found.append(lead("late"))
    train(machine, control, 1200)
    assert machine.outcomes() == {"late": "kept"}


def counted(machine: Machine) -> int:
    """How often the rules were asked."""
    return [kind for kind, _ in machine.told].count("diagnosed")


def asked_at_a_price(control: Controller) -> None:
    """The rules find nothing, and asking them takes half a second."""
    object.__setattr__(control._world, "diagnose", lambda first_step: Found([], cost_ns=5e8))


def test_a_loop_that_is_over_in_a_few_seconds_is_left_alone_and_the_next_one_tuned():
    machine = Machine()
    action = Change(machine, "good", factor=0.5)
    control = controller(machine, [action])
    left = 5_000_000_000 // (20 * MS)
    control._world.job.steps_left = lambda: max(0, left - machine.steps)
    train(machine, control, left)
    assert (counted(machine), action.calls, control.state, machine.stopped) == (0, [], "observing", 0)
    control._world.job.steps_left = lambda: 10_000
    train(machine, control, 1000)
    assert machine.outcomes() == {"good": "kept"}


@pytest.mark.parametrize("policy", [Policy(only=frozenset({"good"})), Policy(dry_run=True)])
def test_what_the_user_asks_for_is_done_in_a_short_run_too(policy):
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)], policy=policy)
    control._world.job.steps_left = lambda: 100
    train(machine, control, 200)
    assert counted(machine) == 1
    assert set(machine.outcomes()) == {"good"}


def test_the_rules_are_asked_again_when_two_hundredths_of_the_time_pay_for_it():
    """Steps of a third of a millisecond: 200 pass in no time."""
    machine = Machine(base_ns=MS / 3, memory=0.0)
    control = controller(machine, [], [])
    asked_at_a_price(control)
    for seconds, times in ((20, 1), (30, 2), (45, 2), (55, 3)):
        while machine.now < seconds * 1e9:
            train(machine, control, 100)
        assert counted(machine) == times, seconds


def test_where_the_run_is_over_before_that_tuning_ends_at_once():
    machine = Machine(base_ns=MS / 3)
    control = controller(machine, [], [])
    asked_at_a_price(control)
    control._world.job.steps_left = lambda: 60_000
    while machine.now < 3 * 1e9:
        train(machine, control, 100)
    assert (counted(machine), control.state) == (1, "ended")


@pytest.mark.parametrize("left, times", [(100_000, 2), (1000, 1)])
def test_what_was_kept_pays_for_another_diagnosis_if_it_wins_more_than_that_takes(left, times):
    """Half of 20 ms for so many steps."""
    machine = Machine(memory=0.0)
    control = controller(machine, [Change(machine, "good", factor=0.5), Change(machine, "another")])
    found = [lead("good")]
    object.__setattr__(control._world, "diagnose", lambda first_step: Found(found, cost_ns=20e9))
    control._world.job.steps_left = lambda: left
    train(machine, control, 600)
    assert machine.outcomes() == {"good": "kept"}
    assert counted(machine) == times


def test_where_no_trial_came_of_what_was_begun_it_is_not_said_to_be_tried():
    machine = Machine()
    control = controller(machine, [Change(machine, "guess", gives_up="no room", unasked=True)], [])
    train(machine, control, 200)
    assert (counted(machine), control.state) == (1, "waiting")


@pytest.mark.parametrize("source, found", [("[1, 2]", [1, 2]), ("1 / 0", [])])
def test_a_question_tells_what_its_answer_took(source, found, tmp_path: Path, monkeypatch):
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    (tmp_path / "answering.py").write_text(f"{busy}def answer():\n    return {source}\n")
    monkeypatch.syspath_prepend(tmp_path)
    question = Question("answering")
    while (told := question.answer()) is None:
        time.sleep(0.02)
    assert told == found
    assert question.cpu_s >= 0.3
