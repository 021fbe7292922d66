"""What a change costs once, against what is left of the run; and what must go again after a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from diagnose.core.command import Command
from diagnose.core.job import Job
from diagnose.tuner.controller import Controller
from diagnose.tuner.policy import Policy
from tests.simulated_job import MS, Change, Machine, controller, lead, train, train_until


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


@pytest.mark.parametrize("before_s", [0, 300])
def test_what_costs_more_than_the_rest_of_the_run_could_win_is_not_tried(before_s):
    """1000 steps of 20 ms, a fifth of which can be won: 4 s, however long the script loaded its data."""
    machine = Machine(memory=0.0, spread=0.01)
    action = Dear(machine, "dear", start_s=20.0)
    control = tuned(machine, action, left=1000)
    machine.now += before_s * 10**9
    train(machine, control, 300)
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


@pytest.mark.parametrize("left, tried", [(None, True), (1000, True), (600, False)])
def test_a_guess_is_not_tried_where_its_trial_takes_longer_than_it_could_win(left, tried):
    """Eight windows of 100 ms at least; of 1,000 steps of 20 ms a twentieth is a second."""
    machine = Machine(memory=0.0, spread=0.01)
    control = controller(machine, [Change(machine, "guess", factor=0.5, unasked=True)], [])
    control._world.job.steps_left = lambda: left
    train(machine, control, 400)
    assert machine.outcomes() == ({"guess": "kept"} if tried else {})


def test_a_change_without_effect_is_given_up_long_before_its_last_pair():
    pairs = []
    for seed in range(60):
        machine = Machine(seed=seed)
        control = controller(machine, [Change(machine, "null")])
        while not machine.trials():
            train(machine, control, 20)
        pairs.append(machine.trials()[0]["measured"]["pairs"])
    assert sum(pairs) / len(pairs) < 10, "16 where it is measured as long as it may be"


def test_what_wins_much_is_taken_out_again_only_for_a_hundredth_of_the_time():
    machine = Machine(memory=0.0)
    control = controller(machine, [Change(machine, "cache", factor=0.05)])
    train_until(machine, control, "holding")
    begun, taken_out = machine.now, 0
    while machine.steps < 60_000:
        before = machine.now
        train(machine, control, 1)
        taken_out += (machine.now - before) * ("cache" not in machine.factors)
    assert "recheck" in [kind for kind, _ in machine.told]
    assert taken_out < 0.03 * (machine.now - begun)


@dataclass
class Slow(Change):
    """Notes the steps that are made with each of its settings."""

    steps: dict[int | None, int] = field(default_factory=dict)
    look_ns: int = 0
    choose_ns: int = 0

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        with super().apply(job, prepared):
            begun = self.machine.steps
            yield
            self.steps[prepared] = self.steps.get(prepared, 0) + self.machine.steps - begun

    def check(self, job: Job) -> None:
        super().check(job)
        self.machine.now += self.look_ns

    def values(self, job: Job) -> Sequence[int | None]:
        self.machine.now += self.choose_ns
        return super().values(job)


def test_a_setting_with_which_steps_take_seconds_longer_is_dropped_after_one_of_them():
    """Steps of two seconds: a tenth of the threads makes twenty of them."""
    machine = Machine(base_ns=2000 * MS, spread=0.02, memory=0.0)
    knob = Slow(machine, "knob", choices=(1, 2, 4), factor_of={1: 10.0, 2: 0.5, 4: 0.9})
    control = controller(machine, [knob])
    while not machine.trials():
        train(machine, control, 1)
    assert (machine.outcomes(), machine.trials()[0]["value"]) == ({"knob": "kept"}, 2)
    assert knob.steps[1] == 2, "one to settle, and one that is looked at"
    assert control._course.spending.spent_ns > 2 * 18_000 * MS


def test_where_that_is_so_with_every_setting_none_is_tried_further():
    machine = Machine(base_ns=2000 * MS, spread=0.02, memory=0.0)
    knob = Slow(machine, "knob", choices=(1, 2), factor=10.0)
    train(machine, controller(machine, [knob]), 100)
    assert machine.trials()[0]["reason"] == "with each setting a step takes more than twice as long"
    assert knob.steps == {1: 2, 2: 2}


def test_an_action_of_one_setting_is_given_up_as_soon():
    machine = Machine(base_ns=2000 * MS, spread=0.02, memory=0.0)
    slow = Slow(machine, "slow", factor=10.0)
    train(machine, controller(machine, [slow]), 100)
    assert machine.outcomes() == {"slow": "reverted"}
    assert slow.steps == {None: 2}


def test_a_short_pause_in_its_first_step_is_no_reason_to_give_an_action_up():
    machine = Machine(base_ns=20 * MS, spread=0.02, memory=0.0)
    pausing = Slow(machine, "pausing", factor=0.5)
    step_ns, paused = machine.step_ns, []

    def step() -> int:
        if "pausing" in machine.factors and not paused:
            paused.append(machine.steps)
            return 500 * MS
        return step_ns()

    object.__setattr__(machine, "step_ns", step)
    train(machine, controller(machine, [pausing]), 400)
    assert paused and machine.outcomes() == {"pausing": "kept"}


def test_looks_at_an_action_and_the_choice_of_its_settings_are_paid_for():
    machine = Machine(spread=0.02, memory=0.0)
    dear = Slow(machine, "dear", factor=2.5, look_ns=1500 * MS, choose_ns=2000 * MS)
    control = controller(machine, [dear])
    train(machine, control, 300)
    assert machine.outcomes() == {"dear": "reverted"}
    assert control._course.spending.spent_ns >= 3500 * MS


def test_while_nothing_is_measured_the_controller_is_hardly_asked():
    machine = Machine(base_ns=0.3 * MS, memory=0.0, spread=0.01)
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    train(machine, control, 20_000)
    assert machine.outcomes() == {"good": "kept"}
    assert machine.boundaries < 4_000


def test_a_command_wakes_a_controller_that_rests():
    machine, commands = Machine(), deque[Command]()
    control = controller(machine, [Change(machine, "good", factor=0.5)], commands=commands)
    train(machine, control, 1_000)
    while not control.rests(machine.steps + 1):
        train(machine, control, 1)
    commands.append(Command(command="undo", argument="good"))
    train(machine, control, 1)
    assert not machine.factors


def test_an_action_that_counts_steps_is_called_after_each_and_wakes_nobody():
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    called: list[int] = []
    control._world.job.on_step.append(lambda: called.append(machine.steps))
    train(machine, control, 1_000)
    control._freeze("a rank is gone")
    before = machine.boundaries
    train(machine, control, 1_000)
    assert called == list(range(1, 2_001))
    assert before < 500 and machine.boundaries - before < 50


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_fails_in_it_while_nobody_looks_ends_the_tuning_of_that_rank_once(ranks: int):
    machine = Machine()
    control = controller(machine, [Change(machine, "good", factor=0.5)])
    train(machine, control, 1_000)
    while not control.rests(machine.steps + 1):
        train(machine, control, 1)
    called: list[int] = []

    def fails() -> None:
        called.append(machine.steps)
        raise OSError("on_step failed")

    control._world.job.on_step.append(fails)
    control._world.ranks.num = ranks  # type: ignore[misc]  # of two, none undoes alone what both keep
    train(machine, control, 1)
    assert called == [machine.steps]
    assert (control.state, bool(machine.factors)) == (("ended", False) if ranks == 1 else ("frozen", True))
    assert [kind for kind, _ in machine.told].count("tuning_error") == 1
    assert "on_step failed" in machine.last("tuning_error")["error"]


def test_what_makes_steps_twenty_times_as_fast_is_not_taken_out_again_soon_after_its_confirmation():
    machine = Machine(memory=0.0)
    control = controller(machine, [Change(machine, "great", factor=0.05)])
    train_until(machine, control, "holding")
    train(machine, control, 3_000)
    assert "recheck" not in [kind for kind, _ in machine.told]


@pytest.mark.parametrize("known", [True, False])
def test_where_the_end_is_known_tuning_costs_a_twentieth_of_the_run_at_most(known):
    """A minute of steps of 20 ms. Each bad change costs a third of a second."""
    total = 3000
    machine = Machine(memory=0.0, spread=0.01)
    good = Change(machine, "good", factor=0.9)
    bad = [Change(machine, f"bad-{number}", factor=1.9) for number in range(24)]
    leads = [lead("good", speedup=3.0), *(lead(each.name) for each in bad)]
    control = controller(machine, [good, *bad], leads)
    if known:
        control._world.job.steps_left = lambda: max(0, total - machine.steps)
    train(machine, control, total)
    spent_s = control._course.spending.spent_ns / 1e9
    assert spent_s < 0.05 * 60 + 0.4 if known else spent_s > 5
    if known:
        assert (set(machine.factors), control.state) == ({"good"}, "holding")
        assert machine.last("confirmation")["pairs"] >= 6
