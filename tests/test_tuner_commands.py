"""Commands to the tuner: obeyed between trials, on every rank, never more than compared."""

from __future__ import annotations

import math
import timeit
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.analysis.composition import window_of
from diagnose.analysis.tuning import tuning_of
from diagnose.core.command import Command
from diagnose.core.ledger import COLUMNS
from diagnose.core.trial import Safety, Tuning
from diagnose.report._tuning_words import verdict
from diagnose.store.reader import RankLog
from diagnose.tuner.controller import Controller
from diagnose.tuner.kept import Kept
from diagnose.tuner.policy import Policy
from tests.simulated_job import Change, Machine, controller, lead, train, train_until
from tests.simulated_loss import Training, tuned


def test_looking_for_commands_at_the_end_of_a_step_takes_less_than_a_microsecond(tmp_path: Path) -> None:
    control = controller(Machine(), [])
    orders = control._orders
    best_s = min(timeit.repeat(orders.wait, number=10_000, repeat=20)) / 10_000
    assert best_s < 1e-6, f"{best_s * 1e9:.0f} ns"


def ask(control: Controller, command: str, argument: str = "") -> None:
    control._world.commands.append(Command(command=command, argument=argument))


def answers(machine: Machine) -> list[tuple[str, str, str]]:
    told = [detail for kind, detail in machine.told if kind == "command"]
    return [(each["command"], each["state"], each["reason"]) for each in told]


def states(machine: Machine) -> list[str]:
    return [detail["state"] for kind, detail in machine.told if kind == "tuning"]


def test_a_pause_begins_no_trial_and_resuming_does() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    ask(control, "pause-tuning")
    train(machine, control, 500)
    assert (control.state, machine.trials()) == ("paused", [])
    assert answers(machine) == [("pause-tuning", "done", "")]
    ask(control, "resume-tuning")
    train(machine, control, 800)
    assert machine.factors == {"good": 0.5}
    assert states(machine)[:4] == ["observing", "paused", "observing", "trying"]


def test_what_is_kept_stays_in_force_while_tuning_is_paused() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    train_until(machine, control, "holding")
    ask(control, "pause-tuning")
    train(machine, control, 2000)
    assert machine.factors == {"good": 0.5}
    assert not [kind for kind, _ in machine.told if kind == "recheck"]
    control.finish()
    assert machine.factors == {}, "the end of the script undoes it, paused or not"


def test_an_alarm_of_the_loss_does_not_end_a_pause() -> None:
    machine = Machine()
    training = Training(machine)
    fewer = Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION)
    control = tuned(machine, training, fewer, Change(machine, "late", factor=0.5, not_before=1000))
    train_until(machine, control, "holding")
    ask(control, "pause-tuning")
    train(machine, control, 10)
    training.wrong = lambda: math.nan
    train(machine, control, 1)
    assert machine.factors == {}
    training.wrong = lambda: None
    train(machine, control, 2000)
    assert (control.state, machine.factors) == ("paused", {})
    ask(control, "resume-tuning")
    train(machine, control, 1000)
    assert set(machine.factors) == {"late"}


def test_an_action_is_undone_and_not_tried_again() -> None:
    machine = Machine()
    good, better = Change(machine, "good", factor=0.7), Change(machine, "better", factor=0.5)
    control = controller(machine, [good, better])
    train(machine, control, 1500)
    assert set(machine.factors) == {"good", "better"}
    ask(control, "undo", "good")
    train(machine, control, 600)
    assert set(machine.factors) == {"better"}
    assert machine.last("dropped") == {"action": "good", "reason": "asked for in the dashboard"}
    assert good.calls.count("apply") == good.calls.count("undo")
    ask(control, "undo", "good")
    train(machine, control, 5)
    assert answers(machine)[-1] == ("undo", "refused", "good is not in force")


def test_what_needs_leave_is_tried_once_it_has_it() -> None:
    machine = Machine()
    exact = Change(machine, "exact-fix", factor=0.8)
    other = Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION)
    control = controller(machine, [exact, other])
    train(machine, control, 1500)
    assert machine.outcomes() == {"exact-fix": "kept", "fewer-bits": "not_allowed"}
    ask(control, "allow", "precision")
    train(machine, control, 1500)
    assert machine.outcomes() == {"exact-fix": "kept", "fewer-bits": "kept"}
    assert set(machine.factors) == {"exact-fix", "fewer-bits"}
    assert control.state == "holding"
    ask(control, "allow", "precision")
    train(machine, control, 5)
    assert answers(machine)[-1] == ("allow", "refused", "precision is allowed already")


def test_leave_that_is_taken_back_undoes_what_needed_it() -> None:
    machine = Machine()
    actions = [
        Change(machine, "exact-fix", factor=0.7),
        Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION),
    ]
    control = controller(machine, actions, policy=Policy(allowed=frozenset({Safety.PRECISION})))
    train(machine, control, 1500)
    assert set(machine.factors) == {"exact-fix", "fewer-bits"}
    ask(control, "forbid", "precision")
    train(machine, control, 600)
    assert set(machine.factors) == {"exact-fix"}
    ask(control, "forbid", "exact")
    train(machine, control, 5)
    assert machine.factors == {}
    assert [state for _, state, _ in answers(machine)] == ["done", "done"]


def test_a_command_in_the_middle_of_a_trial_waits_for_its_end() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "a", factor=0.5), Change(machine, "b", factor=0.9)])
    train_until(machine, control, "trying")
    ask(control, "pause-tuning")
    train(machine, control, 2)
    assert answers(machine) == []
    while not answers(machine):
        train(machine, control, 1)
    assert machine.outcomes() == {"a": "kept"}
    train(machine, control, 500)
    assert machine.outcomes() == {"a": "kept"}


def test_what_was_forbidden_is_tried_again_once_it_is_allowed_again() -> None:
    machine = Machine()
    actions = [
        Change(machine, "exact-fix", factor=0.7),
        Change(machine, "fewer-bits", factor=0.5, safety=Safety.PRECISION),
    ]
    control = controller(machine, actions, policy=Policy(allowed=frozenset({Safety.PRECISION})))
    train(machine, control, 1500)
    ask(control, "forbid", "precision")
    train(machine, control, 600)
    assert set(machine.factors) == {"exact-fix"}
    ask(control, "allow", "precision")
    train(machine, control, 1500)
    assert set(machine.factors) == {"exact-fix", "fewer-bits"}
    tuning = told_by(machine)
    assert sorted(trial.action for trial in tuning.kept) == ["exact-fix", "fewer-bits"]
    assert tuning.dropped == {}


def log_of(machine: Machine, num_steps: int = 0) -> RankLog:
    events = [(0, 0, kind, detail) for kind, detail in machine.told]
    return RankLog(path=Path(), steps=np.zeros((num_steps, len(COLUMNS)), np.int64), events=events)


def told_by(machine: Machine, num_steps: int = 0) -> Tuning:
    tuning = tuning_of(log_of(machine, num_steps))
    assert tuning is not None
    return tuning


@pytest.mark.parametrize("factor, is_kept", [(1.0, False), (0.5, True)])
def test_a_run_in_which_nothing_is_kept_is_judged_by_its_many_steps_after_the_trials(
    factor, is_kept
) -> None:
    machine = Machine()
    train(machine, controller(machine, [Change(machine, "fix", factor=factor)]), 1500)
    tuning = told_by(machine, 1500)
    assert bool(tuning.kept) == is_kept
    part = window_of({}, log_of(machine, 1500), None, 1).part
    assert part == tuning.as_it_is
    first, last = part
    if is_kept:
        assert (first, tuning.left_alone) == (0, None)
    else:
        spent = sum(trial.steps_spent for trial in tuning.trials)
        assert last == 1500 and first >= spent > 0
        assert last - first > 3 * tuning.untouched[1]


@pytest.mark.parametrize("in_force, left_alone", [([], (60, 1500)), (["fix"], None)])
def test_steps_with_what_was_in_force_when_the_ranks_stopped_deciding_are_not_those_of_the_script(
    in_force, left_alone
) -> None:
    machine = Machine()
    machine.told += [
        ("tuning", {"state": "trying", "step": 40}),
        ("frozen", {"reason": "rank 1 did not answer", "in_force": in_force}),
        ("tuning", {"state": "frozen", "step": 60}),
    ]
    assert told_by(machine, 1500).left_alone == left_alone


def test_a_speedup_that_was_measured_with_more_than_is_kept_is_not_told_any_more() -> None:
    machine = Machine()
    actions = [Change(machine, "good", factor=0.7), Change(machine, "better", factor=0.5)]
    control = controller(machine, actions)
    train(machine, control, 1500)
    both = told_by(machine).confirmation
    assert both is not None and both.speedup > 2.5
    ask(control, "undo", "better")
    train(machine, control, 5)
    assert (told_by(machine).confirmation, told_by(machine).rechecks) == (None, ())
    train(machine, control, 1500)
    assert told_by(machine).rechecks[-1].speedup == pytest.approx(1 / 0.7, rel=0.1)


def test_a_single_fix_that_was_not_confirmed_is_no_plural() -> None:
    machine = Machine()
    machine.told.append(("tuning", {"state": "trying", "step": 0}))
    kept = {"safety": "exact", "outcome": "kept", "reason": "", "predicted": None, "measured": None}
    machine.told.append(("trial", {"action": "one", **kept}))
    assert verdict(told_by(machine)) == "1 fix kept; the script ended before it was confirmed"


def test_what_is_kept_after_a_confirmation_leaves_that_to_the_first_ones() -> None:
    machine = Machine()
    machine.told.append(("tuning", {"state": "trying", "step": 0}))
    together = {"pairs": 6, "detectable": 1.2, "without_ns": 17.0, "with_ns": 10.0}
    confirmation = {"speedup": 1.7, "low": 1.5, "high": 2.0, **together}
    kept = {"safety": "exact", "outcome": "kept", "reason": "", "predicted": None, "measured": None}
    for name in ("one", "two"):
        machine.told.append(("trial", {"action": name, **kept}))
    machine.told.append(("confirmation", confirmation))
    machine.told.append(("trial", {"action": "three", **kept}))
    tuning = told_by(machine)
    assert (tuning.confirmation, tuning.num_earlier) == (None, 2)
    assert verdict(tuning) == (
        "tuned to 1.7x (1.5 to 2.0) of its speed with 2 fixes, confirmed on against off; 1 more kept since"
    )
    machine.told.append(("dropped", {"action": "two", "reason": "it gave itself up"}))
    assert told_by(machine).earlier is None
    assert verdict(told_by(machine)) == "2 fixes kept; the script ended before they were confirmed together"
    machine.told.append(("confirmation", confirmation))
    assert verdict(told_by(machine)).endswith("with 2 fixes, confirmed on against off")


def test_what_is_kept_after_everything_was_undone_counts() -> None:
    machine = Machine()
    actions = [Change(machine, "first", factor=0.5), Change(machine, "second", factor=0.6)]
    control = controller(machine, actions)
    train(machine, control, 1500)
    trials = [detail for kind, detail in machine.told if kind == "trial"]
    machine.told.append(("undone", {"reason": "slower"}))
    assert told_by(machine).kept == () and told_by(machine).undone == "slower"
    machine.told.append(("trial", trials[0]))
    tuning = told_by(machine)
    assert [trial.action for trial in tuning.kept] == [trials[0]["action"]]
    assert (tuning.undone, tuning.dropped) == ("", {trials[1]["action"]: "slower"})


def test_a_command_does_not_wait_until_another_trial_is_affordable() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "a", factor=0.5), Change(machine, "b", factor=0.9)])
    while not machine.outcomes():
        train(machine, control, 1)
    control._course.spending.spent_ns = 1e15
    train(machine, control, 400)
    assert machine.outcomes() == {"a": "kept"}
    ask(control, "undo", "a")
    train(machine, control, 2)
    assert answers(machine) == [("undo", "done", "")]
    assert machine.factors == {}
    ask(control, "pause-tuning")
    train(machine, control, 2)
    assert control.state == "paused"
    control._course.spending.spent_ns = 0
    ask(control, "resume-tuning")
    train(machine, control, 500)
    assert "b" in machine.outcomes()


def test_commands_after_the_end_of_tuning_are_refused() -> None:
    machine = Machine()
    control = controller(machine, [])
    ask(control, "pause-tuning")
    control.finish()
    assert answers(machine) == [("pause-tuning", "refused", "tuning has ended")]


def test_a_run_that_reuses_settings_tries_nothing_new() -> None:
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)], reuse=[Kept(action="good")])
    train(machine, control, 200)
    ask(control, "allow", "precision")
    train(machine, control, 600)
    assert answers(machine)[0][1] == "refused"
    assert machine.factors == {"good": 0.5}


@pytest.mark.parametrize("command", ["pause-tuning", "undo", "forbid"])
@pytest.mark.parametrize("at", [3, 40, 120, 260, 700, 1200])
def test_whatever_is_asked_whenever_the_end_undoes_everything(command: str, at: int) -> None:
    argument = {"undo": "a", "forbid": "exact"}.get(command, "")
    machine = Machine(seed=at)
    actions = [Change(machine, "a", factor=0.5), Change(machine, "b", factor=0.6)]
    control = controller(machine, actions, [lead("a"), lead("b")])
    train(machine, control, at)
    ask(control, command, argument)
    train(machine, control, 300)
    control.finish()
    assert machine.factors == {}
    for action in actions:
        assert action.calls.count("apply") == action.calls.count("undo")
        assert action.calls.count("prepare") == action.calls.count("unprepare")


class Together:
    """The second rank of two, as seen from one plan: it says what the first does, and is asked no more."""

    rank = 1
    num = 2

    def __init__(self, asked: deque[list[dict[str, str]]]) -> None:
        self.asked = asked

    def exchange(self, about: str, value: Any, *, dear: bool = False) -> list[Any]:
        if about == "commands":
            return [self.asked.popleft() if self.asked else [], value]
        return [value, value]

    def leave(self, reason: str) -> None:
        pass


def test_every_rank_does_what_the_first_was_asked_for() -> None:
    machine = Machine()
    asked = deque([[], [{"command": "pause-tuning", "argument": ""}]])
    control = controller(machine, [Change(machine, "a", factor=0.5)], ranks=Together(asked))
    ask(control, "undo", "a")  # on a rank that is not the first nobody is asked
    control._world.commands.clear()
    train(machine, control, 20)
    assert control._orders.paused is False
    control._orders._obey()
    control._orders._obey()
    assert control._orders.paused is True
    assert answers(machine) == [("pause-tuning", "done", "")]


def test_what_another_rank_was_asked_for_is_done_too() -> None:
    machine = Machine()
    control = controller(machine, [], ranks=Together(deque()))
    ask(control, "pause-tuning")
    control._orders._obey()
    assert control._orders.paused is True
    assert answers(machine) == [("pause-tuning", "done", "")]
