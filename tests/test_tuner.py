"""The controller on a simulated job: its clock is ours, its actions change only how long a step takes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.errors import DiagnoseError
from diagnose.core.finding import Gain
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.agreement import Alone, Ranks
from diagnose.tuner.controller import Controller
from diagnose.tuner.installed import Installed
from diagnose.tuner.kept import Kept, read
from diagnose.tuner.paired import PairedTest, Verdict, t_point, window_mean
from diagnose.tuner.policy import Lead, Policy
from diagnose.tuner.world import World

MS = 1_000_000


@dataclass
class Machine:
    """A job whose steps take `base_ns` times the factor of each action in force, times noise."""

    seed: int = 0
    base_ns: float = 20 * MS
    spread: float = 0.1
    memory: float = 0.15
    now: int = 0
    steps: int = 0
    factors: dict[str, float] = field(default_factory=dict)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stopped: int = 0
    boundaries: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._level = 0.0

    def step_ns(self) -> int:
        """Noise as measured on shared machines: much of it lasts a hundred steps, and one in a hundred
        takes three times as long."""
        draw = self._random.gauss
        self._level = 0.99 * self._level + draw(0, self.memory * math.sqrt(1 - 0.99**2))
        spike = 3.0 if self._random.random() < 0.01 else 1.0
        noise = math.exp(self._level + draw(0, self.spread))
        return int(self.base_ns * math.prod(self.factors.values()) * noise * spike)

    def trials(self) -> list[dict[str, Any]]:
        return [detail for kind, detail in self.told if kind == "trial"]

    def outcomes(self) -> dict[str, str]:
        return {trial["action"]: trial["outcome"] for trial in self.trials()}

    def last(self, kind: str) -> dict[str, Any]:
        return [detail for told, detail in self.told if told == kind][-1]


@dataclass
class Change(Action):
    """An action that makes steps take `factor` times as long."""

    machine: Machine
    name: str
    factor: float = 1.0
    safety: Safety = Safety.EXACT  # type: ignore[misc]  # a variable of the class elsewhere
    order: int = 30  # type: ignore[misc]
    excludes: frozenset[str] = frozenset()  # type: ignore[misc]
    settle_steps: int = 1  # type: ignore[misc]
    window_steps: int = 5  # type: ignore[misc]
    touches: str = "nothing"  # type: ignore[misc]
    unasked: bool = False  # type: ignore[misc]
    at_start: bool = False  # type: ignore[misc]
    frees_memory: bool = False  # type: ignore[misc]
    refuses: str = ""
    not_before: int = 0
    gives_up: str = ""
    fails_on: str = ""
    error: type[Exception] = OSError
    leaves_trace: bool = False
    choices: Sequence[int | None] = (None,)
    factor_of: dict[int | None, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def check(self, job: Job) -> None:
        self._call("check")
        if self.refuses:
            raise CannotApply(self.refuses)
        if self.machine.steps < self.not_before:
            raise NotYet("it is too early")

    def values(self, job: Job) -> Sequence[int | None]:
        return self.choices

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        self._call("prepare")
        yield value
        self._call("unprepare")

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        self._call("apply")
        if self.gives_up:
            raise CannotApply(self.gives_up)
        assert self.name not in self.machine.factors, "it is in force already"
        self.machine.factors[self.name] = self.factor_of.get(prepared, self.factor)
        yield
        if not self.leaves_trace:
            del self.machine.factors[self.name]
        self._call("undo")

    def state(self, job: Job) -> Any:
        return self.machine.factors.get(self.name)

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails_on:
            raise self.error(f"{what} failed")


class Found:
    """A diagnosis that takes so many steps."""

    def __init__(self, leads: list[Lead], steps: int = 2, cost_ns: float = 0.0) -> None:
        self._leads, self._steps, self.cost_ns = leads, steps, cost_ns

    def leads(self) -> list[Lead] | None:
        self._steps -= 1
        return None if self._steps >= 0 else self._leads

    def close(self) -> None:
        self._steps = 0


@dataclass(frozen=True)
class Numbers:
    ok: bool
    reason: str = "compared"


def lead(*actions: str, speedup: float = 1.5, rule: str = "some-fault") -> Lead:
    return Lead(rule=rule, actions=actions, gain=Gain(speedup=speedup, low=1.0, high=2 * speedup))


def controller(
    machine: Machine,
    actions: Sequence[Change],
    leads: Sequence[Lead] | None = None,
    *,
    policy: Policy | None = None,
    reuse: Sequence[Kept] | None = None,
    numbers: Numbers = Numbers(ok=True),
    ranks: Ranks | None = None,
    **more: Any,
) -> Controller:
    found = leads if leads is not None else [lead(action.name) for action in actions]

    def check(job: Job, installed: Installed) -> Numbers:
        context: AbstractContextManager[None] = installed.context()
        with context:
            pass
        return numbers

    def stop() -> None:
        machine.stopped += 1

    world = World(
        job=Job(),
        actions={action.name: action for action in actions},
        diagnose=lambda first_step: Found(list(found)),
        watch=nullcontext,
        check_numerics=check,
        tell=lambda kind, detail: machine.told.append((kind, detail)),
        stop=stop,
        clock=lambda: machine.now,
        ranks=ranks or Alone(),
        **more,
    )
    return Controller(world, policy or Policy(), reuse)


def train(machine: Machine, control: Controller, steps: int) -> None:
    for _ in range(steps):
        machine.now += machine.step_ns()
        machine.steps += 1
        if not control.rests(machine.steps):
            machine.boundaries += 1
            control.boundary(machine.steps, aside=False)


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


AHEAD, LAUNCH_NS = 17, MS
"""A loop that reads nothing from its GPU was so many steps ahead of it."""


@dataclass
class Device(Machine):
    """A machine whose steps only give a device work, until too much of it waits."""

    done: list[int] = field(default_factory=lambda: [0] * AHEAD)
    synchronized: list[tuple[int, ...]] = field(default_factory=list)

    def step_ns(self) -> int:
        begins = max(self.done[-1], self.now + LAUNCH_NS)
        self.done.append(begins + super().step_ns())
        return max(LAUNCH_NS, self.done[-AHEAD] - self.now)

    def synchronize(self) -> None:
        if self.now < self.done[-1]:
            self.synchronized.append(tuple(self.factors))
        self.now = max(self.now, self.done[-1])


@pytest.mark.parametrize("factor", [0.6, 1.4])
def test_the_time_of_a_window_is_that_of_its_own_work_on_the_device(factor):
    machine = Device(seed=1, spread=0.03, memory=0.05)
    control = controller(machine, [Change(machine, "one", factor)], synchronize=machine.synchronize)
    while not machine.trials():
        train(machine, control, 1)
    (trial,) = machine.trials()
    measured = trial["measured"]
    assert measured["speedup"] == pytest.approx(1 / factor, rel=0.1)
    assert trial["outcome"] == ("kept" if factor < 1 else "reverted")
    on, off = (machine.synchronized.count(each) for each in (("one",), ()))
    assert min(on, off) > measured["pairs"]
    assert abs(on - off) <= 2, "it costs the same in either state, once it has begun"


class Noting(Machine):
    """A machine that also notes when steps end."""

    order: list[str]

    def step_ns(self) -> int:
        self.order.append("step")
        return super().step_ns()


def test_the_device_is_waited_for_before_anything_is_done_and_afterwards():
    machine, order = Noting(), list[str]()
    machine.order = order
    one = Change(machine, "one", 0.5, Safety.PRECISION, touches="model", calls=order)

    def snapshot(job: Job) -> Any:
        order.append("snapshot")

    control = controller(
        machine,
        [one],
        policy=Policy(allowed=frozenset({Safety.PRECISION})),
        synchronize=lambda: order.append("synchronize"),
        snapshot=snapshot,
    )
    while not machine.trials():
        train(machine, control, 1)
    between = [
        [what for what in calls.split() if what != "check"] for calls in " ".join(order).split("step")
    ]
    done = [calls for calls in between if set(calls) != {"synchronize"} and calls]
    assert set().union(*done) == {"synchronize", "prepare", "apply", "undo", "snapshot"}
    assert all(calls[0] == calls[-1] == "synchronize" for calls in done), done


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
    while control.state != "trying":
        train(machine, control, 1)
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


@dataclass
class Exclusive(Change):
    """An action that must not be in force together with those that it excludes."""

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        assert not self.excludes & set(self.machine.factors), "both are in force"
        return super().apply(job, prepared)


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
    while control.state != "holding":
        train(machine, control, 1)
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
    while control.state != "holding":
        train(machine, control, 1)
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


def test_what_changes_the_step_for_others_waits_for_them():
    machine = Machine()
    early, late = Change(machine, "early", factor=0.8), Change(machine, "late", factor=0.8, order=70)
    control = controller(machine, [late, early], [lead("late", speedup=5.0), lead("early", speedup=1.1)])
    train(machine, control, 1500)
    assert [trial["action"] for trial in machine.trials()] == ["early", "late"]


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
        while control.state != "confirming":
            train(machine, control, 1)
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


def test_what_frees_memory_stays_where_a_file_names_it():
    machine = Machine()
    saver = Change(machine, "saver", factor=1.3, frees_memory=True)
    control = controller(machine, [saver], reuse=[Kept(action="saver")])
    train(machine, control, 2000)
    assert machine.factors == {"saver": 1.3}


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


@dataclass
class Settled(Change):
    """An action that knows its setting only while it is not in force."""

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        if self.name in self.machine.factors:
            raise CannotApply("it is so already")
        return {"Loader.size": str(value)}


def test_the_settings_of_what_is_kept_are_asked_for_while_it_is_not_in_force():
    machine = Machine()
    good = Settled(machine, "good", factor_of={2: 0.9, 4: 0.5}, choices=(2, 4))
    train(machine, controller(machine, [good]), 1000)
    assert machine.outcomes() == {"good": "kept"}
    assert machine.trials()[0]["settings"] == {"Loader.size": "4"}
    assert machine.factors == {"good": 0.5}


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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('[action]\nname = "pin-memory"\n', r"an action begins with \[\[action\]\], in double brackets"),
        ('action = ["pin-memory"]\n', r"an action begins with \[\[action\]\], in double brackets"),
        ('[[action]]\nname = "loader-workers"\nvalue = 0\n', "a positive whole number if any; .* and 0"),
        ('[[action]]\nname = "loader-workers"\nvalue = true\n', "it has 'loader-workers' and True"),
        ("[[action]]\nvalue = 2\n", "action 1 needs a name in quotes"),
        ("", "names no action"),
    ],
)
def test_a_file_of_settings_that_is_none_is_refused_in_words(tmp_path, text, reason):
    file = tmp_path / "tuned.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(DiagnoseError, match=reason):
        read(file)


def test_trials_wait_until_they_are_affordable():
    machine = Machine(base_ns=1000 * MS)
    actions = [Change(machine, f"slow{number}", factor=1.8) for number in range(8)]
    control = controller(machine, actions)
    train(machine, control, 400)
    in_trial = sum(t["steps_spent"] for t in machine.trials())
    assert machine.now * 0.05 + 5e9 > in_trial * 0.5 * 0.8e9 * 0.5
    assert len(machine.trials()) < 8


def test_steps_that_evaluate_are_left_out_of_windows():
    machine = Machine(memory=0.0, spread=0.01)
    control = controller(machine, [Change(machine, "null")])
    for number in range(600):
        evaluates = number % 7 == 0
        machine.now += machine.step_ns() * (40 if evaluates else 1)
        control.boundary(number + 1, aside=evaluates)
    measured = machine.trials()[0]["measured"]
    assert measured["without_ns"] < 1.5 * machine.base_ns


def test_windows_span_whole_epochs_where_these_are_short():
    """Sixteen steps of 4 ms, the first of which takes 40 ms more for its workers, or 20 with the change."""
    machine = Machine()
    quicker_start = Change(machine, "quicker-start", window_steps=20, settle_steps=17)
    control = controller(machine, [quicker_start])
    control._world.job.epoch_steps = 16
    for number in range(1500):
        begins = number % 16 == 0
        machine.now += 4 * MS + begins * (20 if machine.factors else 40) * MS
        control.boundary(number + 1, aside=False, begins=begins)
    measured = machine.trials()[0]["measured"]
    assert measured["without_ns"] == (16 * 4 + 40) * MS / 16
    assert measured["with_ns"] == (16 * 4 + 20) * MS / 16


def test_the_t_points_are_those_of_the_tables():
    table = {
        (0.975, 1): 12.706,
        (0.975, 5): 2.571,
        (0.9975, 3): 7.453,
        (0.9975, 10): 3.581,
        (0.975, 30): 2.042,
    }
    for (probability, degrees), point in table.items():
        assert t_point(probability, degrees) == pytest.approx(point, abs=0.001)


def test_one_pause_does_not_decide_a_window():
    assert window_mean([10.0, 10.0, 10.0, 10.0, 1000.0]) == pytest.approx(16.0)


def test_waits_for_workers_that_deliver_in_bursts_count_as_long_as_they_take():
    burst = [10.0, 10.0, 10.0, 170.0]
    assert window_mean(5 * burst) == pytest.approx(50.0)
    assert window_mean(burst) == pytest.approx(17.5), "one of so few may be a pause"


def test_pairs_without_spread_tell_at_the_first_look():
    test = PairedTest()
    for _ in range(4):
        assert test.verdict() is None
        test.add(110.0, 100.0)
    assert test.verdict() is Verdict.FASTER


def test_two_pairs_that_have_nothing_in_common_are_measured_all_the_same():
    test = PairedTest()
    test.add(100.0, 10_000.0)
    test.add(10_000.0, 100.0)
    measured = test.measured()
    assert measured.speedup == pytest.approx(1.0)
    assert (measured.low, measured.high, measured.detectable) == pytest.approx((0.001, 1000.0, 1000.0))


def test_an_action_named_by_the_user_is_tried_without_a_finding():
    machine = Machine()
    actions = [Change(machine, "named", factor=0.5), Change(machine, "other", factor=0.5)]
    train(machine, controller(machine, actions, [], policy=Policy(only=frozenset({"named"}))), 500)
    (trial,) = machine.trials()
    assert (trial["action"], trial["outcome"], trial["predicted"]) == ("named", "kept", None)


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


def test_a_kept_action_that_gives_itself_up_is_dropped_and_the_others_stay():
    machine = Machine(seed=2)
    tired, fine = Change(machine, "tired", factor=0.6), Change(machine, "fine", factor=0.6)
    control = controller(machine, [tired, fine])
    while control.state != "holding":
        train(machine, control, 1)
    assert set(machine.factors) == {"tired", "fine"}
    tired.gives_up = "the script changed its dataset"
    train(machine, control, 3_000)
    assert set(machine.factors) == {"fine"}
    assert machine.last("dropped") == {"action": "tired", "reason": "the script changed its dataset"}
    assert control.state == "holding"


def test_a_fault_that_shows_late_is_found_late():
    machine = Machine()
    found: list[Lead] = []
    control = controller(machine, [Change(machine, "late", factor=0.5)], found)
    train(machine, control, 150)
    assert machine.trials() == []
    found.append(lead("late"))
    train(machine, control, 1200)
    assert machine.outcomes() == {"late": "kept"}


def test_a_refusal_that_nobody_asked_for_is_not_told():
    machine = Machine()
    guess = Change(machine, "guess", refuses="no convolution", unasked=True)
    train(machine, controller(machine, [guess], []), 300)
    assert machine.trials() == []


def test_it_is_told_when_the_rules_have_been_asked():
    machine = Machine()
    control = controller(machine, [], [])
    train(machine, control, 20)
    assert "diagnosed" not in [kind for kind, _ in machine.told]
    train(machine, control, 200)
    assert "diagnosed" in [kind for kind, _ in machine.told]


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
    while control.state != "holding":
        train(machine, control, 1)
    assert list(machine.factors) == ["tired", "fine"]
    tired.gives_up = "the script changed its dataset"
    train(machine, control, 3_000)
    control.finish()
    assert machine.last("dropped")["action"] == "tired"
    assert "tuning_error" not in [kind for kind, _ in machine.told]
