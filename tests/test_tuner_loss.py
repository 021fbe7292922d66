"""The watch on the loss: what it takes for an alarm, what it undoes, and what it puts back."""

from __future__ import annotations

import math

import pytest

from benchmarks.loss_alarms import FAULT_AT, FAULTS, HEALTHY, delays, false_alarms
from diagnose.core.command import Command
from diagnose.core.trial import Safety
from diagnose.tuner.controller import Controller
from diagnose.tuner.kept import Kept
from diagnose.tuner.loss_trend import OWN_FAULTS, LossTrend
from diagnose.tuner.policy import Policy
from tests.simulated_job import Change, Machine, Numbers, train, train_until
from tests.simulated_loss import Training, tuned


def lossy(machine: Machine, safety: Safety = Safety.PRECISION, **more: object) -> Change:
    return Change(machine, "lossy", factor=0.5, safety=safety, **more)  # type: ignore[arg-type]


def dropped(machine: Machine) -> list[dict[str, object]]:
    return [detail for kind, detail in machine.told if kind == "dropped"]


@pytest.mark.parametrize("kind", HEALTHY)
def test_a_healthy_loss_gives_no_alarm(kind):
    assert false_alarms(kind, runs=4) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen_within_two_hundred_steps(fault):
    assert all(delay is not None and delay <= 200 < FAULT_AT for delay in delays(fault, runs=4))


def test_one_batch_is_no_divergence():
    trend = LossTrend()
    for number in range(600):
        trend.add(1e6 if number == 400 else 1 + 0.1 * math.sin(number))
    assert not trend.alarm


def test_a_loss_that_stops_falling_is_no_alarm():
    trend = LossTrend()
    for number in range(2000):
        trend.add(max(1.0, 4 - number / 200) + 0.05 * math.sin(number * number))
    assert not trend.alarm


def test_a_loss_that_never_moves_gives_no_alarm():
    trend = LossTrend()
    for _ in range(500):
        trend.add(0.6931471805599453)
    trend.add(0.69314719)
    assert not trend.alarm


def test_a_script_that_has_such_losses_by_itself_needs_many_in_a_row():
    trend = LossTrend()
    trend.add(math.nan)
    assert trend.fatal
    trend.fault_is_own()
    trend.restart()
    for _ in range(OWN_FAULTS - 1):
        trend.add(math.inf)
    assert not trend.alarm
    trend.add(math.nan)
    assert trend.alarm == "the loss is nan"


def test_in_a_trial_what_harms_is_undone_and_the_weights_are_put_back():
    machine = Machine()
    training = Training(machine, lambda: math.nan if machine.factors else None)
    control = tuned(machine, training, lossy(machine))
    train(machine, control, 300)
    (trial,) = machine.trials()
    (weights,) = training.restored
    assert trial["outcome"] == "harmed"
    assert trial["reason"] == (
        f"the loss is nan; weights and optimizer state are those of step {weights} again"
    )
    assert machine.factors == {}


def test_it_is_undone_at_the_end_of_the_very_step():
    machine = Machine()
    seen: list[int] = []

    def wrong() -> float | None:
        if machine.factors:
            seen.append(machine.steps)
            return math.inf
        return None

    train(machine, tuned(machine, Training(machine, wrong), lossy(machine)), 300)
    assert len(seen) == 1


def test_without_room_for_a_snapshot_the_trial_says_so():
    machine = Machine()
    training = Training(machine, room=False)
    train(machine, tuned(machine, training, lossy(machine)), 400)
    assert machine.outcomes() == {"lossy": "kept"}
    assert machine.trials()[0]["reason"] == ("tried without a way back for the weights: there is no room")


def test_weights_that_do_not_fit_any_more_are_left_alone():
    machine = Machine()
    training = Training(machine, lambda: math.nan if machine.factors else None, stale=True)
    train(machine, tuned(machine, training, lossy(machine)), 300)
    assert training.restored == []
    assert machine.trials()[0]["reason"].endswith(
        "the weights could not be put back: a tensor has another shape"
    )


def in_force_too_high(machine: Machine) -> float | None:
    return 20.0 if machine.factors else None


def until_it_was_tried(
    machine: Machine, training: Training, *actions: Change, **more: object
) -> Controller:
    """Trains until the trial is over; the loss has had time before to show how far it scatters."""
    control = tuned(machine, training, *actions, **more)
    while not machine.trials():
        train(machine, control, 1)
    return control


def test_in_a_trial_a_loss_that_rises_is_the_scripts_own_where_the_numbers_are_still_alike():
    machine = Machine()
    training = Training(machine, lambda: in_force_too_high(machine))
    action = lossy(machine, touches="model", not_before=200, window_steps=100)
    until_it_was_tried(machine, training, action)
    (trial,) = machine.trials()
    assert trial["outcome"] == "cannot_tell"
    assert trial["reason"].endswith("which is not its doing: it compared")
    assert (training.restored, machine.factors) == ([], {})


def test_in_a_trial_a_loss_that_rises_puts_the_weights_back_where_the_numbers_are_others_now():
    machine, numbers = Machine(), Numbers(ok=True)

    def wrong() -> float | None:
        if machine.factors:
            object.__setattr__(numbers, "ok", False)
            object.__setattr__(numbers, "reason", "gradients point elsewhere")
        return in_force_too_high(machine)

    training = Training(machine, wrong)
    action = lossy(machine, touches="model", not_before=200, window_steps=100)
    until_it_was_tried(machine, training, action, numbers=numbers)
    (trial,) = machine.trials()
    assert trial["outcome"] == "harmed"
    assert "and gradients point elsewhere; weights and optimizer state are those of" in trial["reason"]
    assert len(training.restored) == 1


def test_in_a_trial_a_loss_that_rises_puts_no_weights_back_where_no_check_can_tell():
    machine = Machine()
    training = Training(machine, lambda: in_force_too_high(machine))
    action = lossy(machine, Safety.TRAINING, not_before=200, window_steps=100)
    until_it_was_tried(machine, training, action)
    (trial,) = machine.trials()
    assert trial["outcome"] == "harmed"
    assert trial["reason"].endswith("that may be the script's own, and the weights are left as they are")
    assert (training.restored, machine.factors) == ([], {})


@pytest.mark.parametrize("touches", ["nothing", "ranks"])
def test_while_holding_what_no_check_can_clear_is_undone(touches):
    machine = Machine()
    training = Training(machine)
    action = lossy(machine, Safety.TRAINING, touches=touches)
    control = tuned(machine, training, action, Change(machine, "fine", factor=0.6))
    train(machine, control, 1000)
    assert set(machine.factors) == {"lossy", "fine"}
    training.wrong = lambda: 20.0 if "lossy" in machine.factors else None
    train(machine, control, 100)
    assert set(machine.factors) == {"fine"}
    (gone,) = dropped(machine)
    assert gone["action"] == "lossy"
    assert str(gone["reason"]).startswith("the loss rose to 20, from 2.0")
    assert training.restored == [], "what was learnt since stays"
    train(machine, control, 600)
    assert control.state == "holding"


def test_while_holding_a_passing_check_clears_it():
    """A rise with the same gradients is the script's own."""
    machine = Machine()
    training = Training(machine)
    control = tuned(machine, training, lossy(machine, touches="model"))
    train(machine, control, 800)
    training.wrong = lambda: 20.0
    train(machine, control, 200)
    assert set(machine.factors) == {"lossy"}
    assert dropped(machine) == []
    assert machine.last("loss_alarm")["cleared"] == ["lossy"]
    assert [kind for kind, _ in machine.told].count("loss_alarm") == 1
    train(machine, control, 1000)
    assert control.state == "holding"


def test_while_holding_a_failing_check_undoes_it():
    machine = Machine()
    training, numbers = Training(machine), Numbers(ok=True)
    control = tuned(machine, training, lossy(machine, touches="model"), numbers=numbers)
    train(machine, control, 800)
    object.__setattr__(numbers, "ok", False)
    object.__setattr__(numbers, "reason", "gradients point elsewhere")
    training.wrong = lambda: 20.0
    train(machine, control, 200)
    assert machine.factors == {}
    assert str(dropped(machine)[0]["reason"]).endswith("and gradients point elsewhere")


def test_while_holding_no_number_undoes_all_that_may_harm_without_asking():
    machine = Machine()
    training = Training(machine)
    control = tuned(machine, training, lossy(machine, touches="model"), Change(machine, "fine", factor=0.6))
    train(machine, control, 1000)
    training.wrong = lambda: math.nan
    train(machine, control, 1)
    assert set(machine.factors) == {"fine"}
    train(machine, control, 300)
    assert [gone["action"] for gone in dropped(machine)] == ["lossy"], "what is left is not to blame"


def test_an_alarm_in_a_later_trial_undoes_that_and_what_may_harm():
    machine = Machine()
    training = Training(machine)
    later = Change(machine, "later", factor=0.6, order=70)
    control = tuned(machine, training, lossy(machine), later)
    while "later" not in machine.factors:
        train(machine, control, 1)
    training.wrong = lambda: math.nan
    train(machine, control, 5)
    assert machine.factors == {}
    assert machine.outcomes() == {"lossy": "kept", "later": "cannot_tell"}
    assert [gone["action"] for gone in dropped(machine)] == ["lossy"]


def test_an_alarm_while_all_is_off_to_be_measured_leaves_the_rest_in_force():
    machine = Machine()
    training = Training(machine)
    control = tuned(machine, training, lossy(machine), Change(machine, "fine", factor=0.6))
    while not (control.state == "confirming" and machine.factors == {}):
        train(machine, control, 1)
    training.wrong = lambda: math.nan
    train(machine, control, 1)
    training.wrong = lambda: None
    train(machine, control, 3)
    assert set(machine.factors) == {"fine"}


def test_an_alarm_of_settings_from_a_file_undoes_them():
    machine = Machine()
    training = Training(machine)
    control = tuned(machine, training, lossy(machine), reuse=[Kept(action="lossy")])
    train(machine, control, 6)
    training.wrong = lambda: math.nan
    train(machine, control, 10)
    assert machine.factors == {}
    assert control.state != "frozen"
    assert "tuning_error" not in [kind for kind, _ in machine.told]


def test_a_file_being_put_in_force_while_the_loss_is_wrong_ends_nothing():
    machine = Machine()
    training = Training(machine, lambda: math.nan)
    reuse = [Kept(action="lossy"), Kept(action="other")]
    other = Change(machine, "other", factor=0.7, safety=Safety.PRECISION, touches="model")
    control = tuned(machine, training, lossy(machine, touches="model"), other, reuse=reuse)
    train(machine, control, 100)
    assert "tuning_error" not in [kind for kind, _ in machine.told]
    assert machine.factors == {}


@pytest.mark.parametrize("device, asked", [("cpu", 500), ("cuda", 0)])
def test_nobody_judges_the_loss_where_only_exact_changes_are_allowed(device, asked):
    machine = Machine()
    training = Training(machine, lambda: math.nan)
    control = tuned(machine, training, Change(machine, "fine", factor=0.5), policy=Policy())
    control._world.job.device = device
    train(machine, control, 500)
    assert training.asked == asked, "on a device each look is a copy; elsewhere it is there to be shown"
    assert machine.outcomes() == {"fine": "kept"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_losses_that_are_noted_are_asked_for_also_when_nobody_judges_them_any_more(device):
    """Else each backward pass would leave one behind."""
    machine = Machine()
    training = Training(machine)
    control = tuned(machine, training, lossy(machine))
    control._world.job.device = device
    train(machine, control, 20)
    control._world.commands.append(Command(command="forbid", argument="precision"))
    control._world.commands.append(Command(command="forbid", argument="training"))
    train(machine, control, 80)
    asked = training.asked
    train(machine, control, 50)
    assert training.asked == asked + 50, "after it was forbidden"
    control._freeze("a rank is gone")
    train(machine, control, 50)
    assert training.asked == asked + 100, "after tuning has stopped"


@pytest.mark.parametrize(("factor", "watched"), [(0.5, 1_000), (1.5, 0)])
def test_the_loss_of_each_step_is_watched_as_long_as_something_is_in_force_that_may_harm(factor, watched):
    machine = Machine(memory=0.0)
    action = Change(machine, "lossy", factor=factor, safety=Safety.PRECISION)
    control = tuned(machine, Training(machine), action, Change(machine, "fine", factor=0.6))
    train_until(machine, control, "holding")
    train(machine, control, 1_000)
    before = machine.boundaries
    train(machine, control, 1_000)
    assert watched <= machine.boundaries - before <= watched + 300


def test_a_loss_that_rose_by_itself_while_nobody_watched_is_not_charged_to_what_is_tried_next():
    machine = Machine(memory=0.0)
    training = Training(machine)
    action = Change(machine, "lossy", factor=1.5, safety=Safety.PRECISION)
    later = Change(machine, "later", factor=0.5, safety=Safety.TRAINING, window_steps=100)
    fine = Change(machine, "fine", factor=0.6)
    policy = Policy(allowed=frozenset({Safety.PRECISION}))
    control = tuned(machine, training, action, fine, later, policy=policy)
    train_until(machine, control, "holding")
    train(machine, control, 500)
    training.wrong = lambda: 20.0 + machine.steps % 7
    train(machine, control, 10)
    control._world.commands.append(Command(command="allow", argument="training"))
    train(machine, control, 2_000)
    assert machine.outcomes() == {"lossy": "reverted", "fine": "kept", "later": "kept"}


@pytest.mark.parametrize("where", ["undo", "unprepare"])
def test_an_error_on_the_way_back_after_an_alarm_ends_the_tuning(where):
    machine = Machine()
    training = Training(machine, lambda: math.nan if machine.factors else None)
    control = tuned(machine, training, lossy(machine, fails_on=where))
    train(machine, control, 300)
    assert control.state == "ended"
    assert f"{where} failed" in machine.last("tuning_error")["error"]


def test_what_is_allowed_later_is_set_against_the_loss_before_it():
    machine = Machine()
    training = Training(machine)
    control = tuned(machine, training, Change(machine, "fine", factor=0.5), lossy(machine), policy=Policy())
    while control.state != "holding":
        train(machine, control, 1)
    control._world.commands.append(Command(command="allow", argument="precision"))
    while control.state != "trying":
        train(machine, control, 1)
    assert control._world.loss._level is not None
