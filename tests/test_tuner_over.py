"""What has nothing left to work on, as the script is done with that training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from torch import nn

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Outcome, Safety
from diagnose.report._tuning_words import verdict
from diagnose.tuner.controller import Controller
from diagnose.tuner.loss_trend import LossAlarm
from tests.simulated_job import Change, Found, Machine, controller, lead, train, train_until
from tests.simulated_loss import Training, tuned
from tests.test_tuner_agreement import Meeting, Simulated, train_together
from tests.test_tuner_commands import told_by


class Hung(Change):
    """A change that is hung on models."""

    hangs_on: ClassVar[tuple[str, ...]] = ("models",)


def holding(machine: Machine, *actions: Change) -> tuple[Controller, list[nn.Module]]:
    """A job of one model whose changes are kept and confirmed."""
    control = controller(machine, actions)
    models = control._world.job.models = [nn.Linear(2, 1)]
    train_until(machine, control, "holding")
    return control, models


def kinds(machine: Machine) -> list[str]:
    return [kind for kind, _ in machine.told]


def test_it_is_taken_out_and_the_others_stay():
    machine = Machine(seed=2)
    control, models = holding(
        machine, Hung(machine, "hung", factor=0.6), Change(machine, "fine", factor=0.6)
    )
    train(machine, control, 150)
    assert set(machine.factors) == {"hung", "fine"}
    models.clear()
    train(machine, control, 150)
    assert set(machine.factors) == {"fine"}
    assert machine.last("over") == {"action": "hung"}
    assert "dropped" not in kinds(machine)
    assert control.state == "holding"


def test_the_report_goes_on_telling_what_it_won():
    machine = Machine(seed=2)
    control, models = holding(machine, Hung(machine, "hung", factor=0.6))
    before = verdict(told_by(machine))
    assert before.endswith("with 1 fix, confirmed on against off")
    models.clear()
    train(machine, control, 2000)
    control.finish()
    tuning = told_by(machine)
    assert verdict(tuning) == before
    assert [trial.action for trial in tuning.kept] == ["hung"]
    assert tuning.dropped == {} and tuning.rechecks == ()
    holds = [detail["state"] for kind, detail in machine.told if kind == "tuning"]
    assert holds.index("waiting") > holds.index("holding"), "the steps that follow are untuned"


def test_it_is_tried_again_on_what_is_trained_next_when_the_rules_are_asked_again():
    machine = Machine(seed=2)
    control, models = holding(machine, Hung(machine, "hung", factor=0.6))
    models.clear()
    train(machine, control, 150)
    assert machine.factors == {}
    models.append(nn.Linear(2, 1))
    train(machine, control, 6000)
    assert machine.factors == {"hung": 0.6}
    outcomes = [trial["outcome"] for trial in machine.trials()]
    assert outcomes == [Outcome.KEPT.value] * 2


def test_while_it_is_measured_it_is_not_put_on_what_is_trained_by_then():
    machine = Machine(seed=2)
    control = controller(machine, [Hung(machine, "hung", factor=0.6)])
    models = control._world.job.models = [nn.Linear(2, 1)]
    train_until(machine, control, "confirming")
    assert machine.factors == {}
    models[:] = [nn.Linear(2, 1)]
    for _ in range(1500):
        train(machine, control, 1)
        assert machine.factors == {}
    assert not [detail for kind, detail in machine.told if kind == "tuning_error"]


def test_a_setting_that_cannot_be_put_in_force_leaves_the_others():
    class Fussy(Change):
        @contextmanager
        def apply(self, job: Job, prepared: Any) -> Iterator[None]:
            if prepared == 2:
                raise CannotApply("two are one too many")
            with super().apply(job, prepared):
                yield

    machine = Machine(seed=2)
    action = Fussy(machine, "fussy", choices=(1, 2, 3), factor_of={1: 0.9, 3: 0.5})
    control = controller(machine, [action])
    train(machine, control, 1500)
    (trial,) = machine.trials()
    assert (trial["outcome"], trial["value"]) == ("kept", 3)


def test_a_diagnosis_that_a_loss_has_cut_short_is_given_up_before_the_next():
    class Closed(Found):
        closed = False

        def close(self) -> None:
            self.closed = True

    control = controller(Machine(), [])
    cut_short = control._asking._diagnosis = Closed([])
    next(control._asking.diagnose())
    assert cut_short.closed


def test_a_trial_whose_model_goes_tells_of_no_gain_that_nobody_saw_and_is_made_again():
    machine = Machine(seed=2)
    control = controller(machine, [Hung(machine, "hung", factor=0.6)])
    models = control._world.job.models = [nn.Linear(2, 1)]
    train_until(machine, control, "trying")
    train(machine, control, 10)
    models[:] = [nn.Linear(2, 1)]
    train(machine, control, 60)
    assert machine.factors == {} and machine.trials() == []
    train(machine, control, 800)
    assert machine.outcomes() == {"hung": Outcome.KEPT.value}
    assert machine.factors == {"hung": 0.6}


def test_so_is_the_trial_of_what_no_finding_asked_for():
    machine = Machine(seed=2)
    hung = Hung(machine, "hung", factor=0.6, unasked=True)
    control = controller(machine, [hung], leads=[])
    models = control._world.job.models = [nn.Linear(2, 1)]
    while not machine.factors:
        train(machine, control, 1)
    models[:] = [nn.Linear(2, 1)]
    train(machine, control, 800)
    assert machine.outcomes() == {"hung": Outcome.KEPT.value}


def test_nothing_is_refused_for_good_while_the_script_is_between_two_trainings():
    class Bound(Hung):
        def check(self, job: Job) -> None:
            super().check(job)
            if not job.models:
                raise CannotApply("no model has been called in training")

    machine = Machine(seed=2)
    first, second = Bound(machine, "first", factor=0.6), Bound(machine, "second", factor=0.6)
    control = controller(machine, [first, second])
    job = control._world.job
    job.models = [nn.Linear(2, 1)]
    while not machine.factors:
        train(machine, control, 1)
    job.models, job.is_between = [], True
    while first.calls[-1] != "unprepare":  # its window has ended with the training
        train(machine, control, 1)
    job.models, job.is_between = [nn.Linear(2, 1)], False
    train(machine, control, 1500)
    assert machine.outcomes() == {"first": Outcome.KEPT.value, "second": Outcome.KEPT.value}


def test_a_loss_that_is_no_number_once_another_model_is_trained_puts_no_weights_back():
    diverging: list[bool] = []
    machine = Machine(seed=2)
    training = Training(machine, lambda: math.nan if diverging else None)
    control = tuned(machine, training, Hung(machine, "hung", factor=0.6, safety=Safety.PRECISION))
    models = control._world.job.models = [nn.Linear(2, 1)]
    while not machine.factors:
        train(machine, control, 1)
    models[:] = [nn.Linear(2, 1)]
    diverging.append(True)
    train(machine, control, 3)
    diverging.clear()
    assert machine.factors == {} and machine.trials() == [] and training.restored == []
    train(machine, control, 1500)
    assert machine.outcomes() == {"hung": Outcome.KEPT.value}


def test_one_whose_model_goes_in_the_last_windows_tells_of_none_either():
    machine = Machine(seed=2)
    hung = Hung(machine, "hung", factor=1.4)
    control = controller(machine, [hung])
    models = control._world.job.models = [nn.Linear(2, 1)]
    while hung.calls.count("apply") < 2:
        train(machine, control, 1)
    models[:] = [nn.Linear(2, 1)]
    train(machine, control, 60)
    assert hung.calls[-1] == "unprepare" and hung.calls.count("apply") == 2
    assert machine.trials() == []


def test_a_confirmation_whose_model_goes_tells_nothing_and_leaves_the_others():
    machine = Machine(seed=2)
    control = controller(machine, [Hung(machine, "hung", factor=0.6), Change(machine, "fine", factor=0.6)])
    models = control._world.job.models = [nn.Linear(2, 1)]
    train_until(machine, control, "confirming")
    train(machine, control, 20)
    models[:] = [nn.Linear(2, 1)]
    train(machine, control, 300)
    assert machine.factors == {"fine": 0.6}
    assert "confirmation" not in kinds(machine) and "dropped" not in kinds(machine)
    assert machine.last("over") == {"action": "hung"}


def test_a_loss_that_jumps_as_another_model_is_trained_blames_nothing_that_is_over():
    machine = Machine(seed=2)
    control, models = holding(
        machine, Hung(machine, "hung", factor=0.6), Change(machine, "fine", factor=0.6)
    )
    models[:] = [nn.Linear(2, 1)]
    for each in control._changes.kept:
        each.action.safety = Safety.PRECISION
    for _ in control._loss.answer(LossAlarm("the loss has risen", False), control._course.spending):
        pass
    assert machine.last("over") == {"action": "hung"}
    assert [detail["action"] for kind, detail in machine.told if kind == "dropped"] == ["fine"]


@pytest.mark.parametrize("whole", [True, False])
def test_ranks_of_which_one_holds_its_first_model_let_go_together(whole):
    """Another step is the first without it on each, as where a model is in a cycle, or one for good."""
    meeting, jobs = Meeting(2), []
    machines = [Machine(seed=rank) for rank in range(2)]
    controls = []
    for rank, machine in enumerate(machines):
        leads = [lead("hung", speedup=2.0)] if rank == 0 else []
        hung = Hung(machine, "hung", factor=0.6, touches="ranks")
        control = controller(machine, [hung], leads, ranks=Simulated(meeting, rank))
        control._world.job.models = [nn.Linear(2, 1)]
        controls.append(control)
        jobs.append(control._world.job)
    steps = 0
    while controls[0].state != ("holding" if whole else "confirming"):
        train_together(machines, controls, 1)
        steps += 1
        assert steps < 1000
    first = jobs[0].models[0]
    for job in jobs:
        job.models = [nn.Linear(2, 1)]
    for _ in range(60):
        train_together(machines, controls, 10)
        assert whole or machines[0].factors == machines[1].factors
    assert [machine.factors for machine in machines] == [{}, {}]
    assert all(machine.last("over") == {"action": "hung"} for machine in machines)
    assert controls[0].state == controls[1].state == "waiting"
    assert first is not jobs[0].models[0]
