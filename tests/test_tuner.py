"""What the controller tries on a simulated job, in which order, and what becomes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diagnose.core.finding import Gain
from diagnose.core.trial import Safety
from diagnose.tuner.policy import Policy
from tests.simulated_job import MS, Change, Machine, Numbers, Settled, controller, lead, train


def test_what_helps_is_kept_and_what_does_not_is_undone():
    machine = Machine()
    good, bad = Change(machine, "good", factor=0.6), Change(machine, "bad", factor=1.3)
    control = controller(machine, [good, bad])
    train(machine, control, 1000)
    assert machine.outcomes() == {"good": "kept", "bad": "reverted"}
    assert machine.factors == {"good": 0.6}
    assert control.state == "holding"
    measured = machine.trials()[[t["action"] for t in machine.trials()].index("good")]["measured"]
    assert measured["low"] <= 1 / 0.6 <= measured["high"]


def test_the_confirmation_measures_all_that_was_kept_together():
    machine = Machine(seed=3)
    actions = [Change(machine, "a", factor=0.7), Change(machine, "b", factor=0.8)]
    train(machine, controller(machine, actions), 1200)
    confirmation = machine.last("confirmation")
    assert confirmation["pairs"] == 6
    assert confirmation["low"] <= 1 / (0.7 * 0.8) <= confirmation["high"]


def test_what_was_kept_is_confirmed_before_what_is_to_win_little_is_tried():
    machine = Machine(seed=3)
    actions = [Change(machine, "much", factor=0.5), Change(machine, "little", factor=0.97)]
    control = controller(machine, actions, [lead("much", speedup=2.0), lead("little", speedup=1.05)])
    train(machine, control, 1500)
    kinds = [
        detail.get("action", kind) for kind, detail in machine.told if kind in ("trial", "confirmation")
    ]
    assert kinds[:3] == ["much", "confirmation", "little"]


def test_a_change_without_effect_is_kept_in_one_of_a_hundred_trials_at_most():
    kept = 0
    for seed in range(300):
        machine = Machine(seed=seed)
        control = controller(machine, [Change(machine, "null")])
        while machine.stopped == 0 and control.state in ("observing", "trying", ""):
            train(machine, control, 20)
        kept += machine.outcomes()["null"] == "kept"
    assert kept <= 3


def test_a_gain_of_a_quarter_is_found_nine_times_in_ten():
    kept = 0
    for seed in range(100):
        machine = Machine(seed=1000 + seed)
        train(machine, controller(machine, [Change(machine, "quarter", factor=0.8)]), 600)
        kept += machine.outcomes().get("quarter") == "kept"
    assert kept >= 90


def test_the_best_of_several_settings_is_kept():
    machine = Machine(seed=5)
    knob = Change(machine, "knob", choices=(1, 2, 4), factor_of={1: 0.9, 2: 0.5, 4: 0.8})
    train(machine, controller(machine, [knob]), 800)
    assert machine.trials()[0]["value"] == 2
    assert machine.factors == {"knob": 0.5}


def test_a_refusal_is_told_in_its_own_words_and_the_next_is_tried():
    machine = Machine()
    actions = [Change(machine, "picky", refuses="there is no GPU"), Change(machine, "next", factor=0.5)]
    train(machine, controller(machine, actions, [lead("picky", speedup=9.0), lead("next")]), 500)
    assert machine.outcomes() == {"picky": "refused", "next": "kept"}
    assert machine.trials()[0]["reason"] == "there is no GPU"


def test_what_changes_the_numbers_needs_leave():
    machine = Machine()
    lossy = Change(machine, "lossy", factor=0.5, safety=Safety.PRECISION)
    train(machine, controller(machine, [lossy]), 300)
    assert machine.outcomes() == {"lossy": "not_allowed"}
    assert "--allow precision" in machine.trials()[0]["reason"]
    assert lossy.calls == []


def test_with_leave_it_is_tried():
    machine = Machine()
    lossy = Change(machine, "lossy", factor=0.5, safety=Safety.PRECISION)
    policy = Policy(allowed=frozenset({Safety.PRECISION}))
    train(machine, controller(machine, [lossy], policy=policy), 300)
    assert machine.outcomes() == {"lossy": "kept"}


def test_a_failed_numerics_check_refuses():
    machine = Machine()
    wrong = Change(machine, "wrong", factor=0.5, touches="model")
    control = controller(machine, [wrong], numbers=Numbers(ok=False, reason="gradients differ by 3 %"))
    train(machine, control, 300)
    assert machine.outcomes() == {"wrong": "refused"}
    assert machine.trials()[0]["reason"] == "gradients differ by 3 %"
    assert machine.factors == {}


def test_a_dry_run_changes_nothing():
    machine = Machine()
    action = Change(machine, "good", factor=0.5)
    train(machine, controller(machine, [action], policy=Policy(dry_run=True)), 300)
    assert machine.outcomes() == {"good": "not_tried"}
    assert action.calls == ["check"]


def test_what_changes_the_step_for_others_waits_for_them():
    machine = Machine()
    early, late = Change(machine, "early", factor=0.8), Change(machine, "late", factor=0.8, order=70)
    control = controller(machine, [late, early], [lead("late", speedup=5.0), lead("early", speedup=1.1)])
    train(machine, control, 1500)
    assert [trial["action"] for trial in machine.trials()] == ["early", "late"]


def test_what_is_to_win_most_does_not_wait_for_what_no_finding_asks_for_nor_for_what_wins_little():
    machine = Machine()
    actions = [
        Change(machine, "unasked", factor=0.9, unasked=True),
        Change(machine, "little", factor=0.9),
        Change(machine, "ranks", factor=0.5, order=50),
    ]
    control = controller(machine, actions, [lead("little", speedup=1.06), lead("ranks", speedup=1.8)])
    train(machine, control, 1500)
    assert [trial["action"] for trial in machine.trials()] == ["ranks", "little", "unasked"]


def test_a_hopeless_setting_is_dropped_after_one_pair():
    machine = Machine(base_ns=30 * MS)
    train(machine, controller(machine, [Change(machine, "awful", factor=4.0)]), 300)
    (trial,) = machine.trials()
    assert trial["outcome"] == "reverted"
    assert trial["steps_spent"] < 20


def test_a_hopeless_setting_is_told_of_though_no_finding_asked_for_it():
    machine = Machine(base_ns=30 * MS)
    train(machine, controller(machine, [Change(machine, "awful", factor=4.0, unasked=True)], []), 300)
    assert machine.outcomes() == {"awful": "reverted"}


@pytest.mark.parametrize(
    "factor, only, outcome",
    [(1.3, {"saver"}, "kept"), (1.3, set(), "reverted"), (3, {"saver"}, "reverted")],
)
def test_what_frees_memory_is_kept_where_it_was_named_unless_steps_take_twice_as_long(
    factor, only, outcome
):
    machine = Machine()
    saver = Change(machine, "saver", factor=factor, frees_memory=True)
    control = controller(machine, [saver], policy=Policy(only=frozenset(only)))
    train(machine, control, 2000)
    (trial,) = machine.trials()
    assert trial["outcome"] == outcome
    assert machine.factors == ({"saver": factor} if outcome == "kept" else {}), "nor undone as slower later"
    if outcome == "kept":
        assert trial["reason"] == "kept for the memory that it frees"
        assert trial["measured"]["speedup"] == pytest.approx(1 / factor, rel=0.1), "its price is told"


def test_of_the_actions_of_one_finding_the_one_that_wins_more_is_tried_first():
    machine = Machine()
    workers, cache = Change(machine, "workers", factor=0.8), Change(machine, "cache", factor=0.4)
    found = replace(
        lead("workers", "cache", speedup=2.5), gains={"workers": Gain(speedup=1.2, low=1, high=2)}
    )
    train(machine, controller(machine, [workers, cache], [found]), 300)
    assert machine.trials()[0]["action"] == "cache"
    assert machine.trials()[0]["predicted"]["speedup"] == 2.5


def test_an_action_that_is_expected_to_win_nothing_is_not_tried_though_the_fault_is_there():
    machine = Machine()
    found = replace(lead("workers", speedup=2.5), gains={"workers": Gain(speedup=1.0, low=1, high=2)})
    train(machine, controller(machine, [Change(machine, "workers")], [found]), 300)
    assert machine.trials() == []


def test_the_settings_of_what_is_kept_are_asked_for_while_it_is_not_in_force():
    machine = Machine()
    good = Settled(machine, "good", factor_of={2: 0.9, 4: 0.5}, choices=(2, 4))
    train(machine, controller(machine, [good]), 1000)
    assert machine.outcomes() == {"good": "kept"}
    assert machine.trials()[0]["settings"] == {"Loader.size": "4"}
    assert machine.factors == {"good": 0.5}


def test_trials_wait_until_they_are_affordable():
    machine = Machine(base_ns=1000 * MS)
    actions = [Change(machine, f"slow{number}", factor=1.8) for number in range(8)]
    control = controller(machine, actions)
    train(machine, control, 400)
    in_trial = sum(t["steps_spent"] for t in machine.trials())
    assert machine.now * 0.05 + 5e9 > in_trial * 0.5 * 0.8e9 * 0.5
    assert len(machine.trials()) < 8


def test_an_action_named_by_the_user_is_tried_without_a_finding():
    machine = Machine()
    actions = [Change(machine, "named", factor=0.5), Change(machine, "other", factor=0.5)]
    train(machine, controller(machine, actions, [], policy=Policy(only=frozenset({"named"}))), 500)
    (trial,) = machine.trials()
    assert (trial["action"], trial["outcome"], trial["predicted"]) == ("named", "kept", None)


def test_what_only_a_trial_can_tell_is_tried_last():
    machine = Machine()
    guess = Change(machine, "guess", factor=0.8, unasked=True)
    control = controller(
        machine, [guess, Change(machine, "found", factor=0.8)], [lead("found", speedup=1.1)]
    )
    train(machine, control, 1500)
    assert [trial["action"] for trial in machine.trials()] == ["found", "guess"]
    # A run that ends before the guess could be tried must not end with nothing confirmed.
    told = [kind for kind, _ in machine.told if kind in ("trial", "confirmation")]
    assert told == ["trial", "confirmation", "trial", "confirmation"]


def test_a_refusal_that_nobody_asked_for_is_not_told():
    machine = Machine()
    guess = Change(machine, "guess", refuses="no convolution", unasked=True)
    train(machine, controller(machine, [guess], []), 300)
    assert machine.trials() == []
