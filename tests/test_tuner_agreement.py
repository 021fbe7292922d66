"""The controllers of several ranks on simulated jobs, each in a thread of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from diagnose.actions.base import CannotApply
from diagnose.core.command import Command
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.agreement import RanksLost
from diagnose.tuner.controller import Controller
from diagnose.tuner.policy import Policy
from tests.simulated_job import MS, Change, Exclusive, Machine, controller, lead, train
from tests.simulated_loss import Training


class Meeting:
    """Where the ranks of a simulated job exchange values; the exchange of one round may fail."""

    def __init__(self, num: int, fails_at: int = 0) -> None:
        self.num = num
        self.fails_at = fails_at
        self.rounds = [0] * num
        self.values: list[Any] = [None] * num
        self.abouts: list[set[str]] = []
        self.barrier = threading.Barrier(num, timeout=20)


@dataclass
class Simulated:
    """One rank of a `Meeting`."""

    meeting: Meeting
    rank: int
    left: str = ""

    @property
    def num(self) -> int:
        return self.meeting.num

    def exchange(self, about: str, value: Any, *, dear: bool = False) -> list[Any]:
        meeting = self.meeting
        meeting.rounds[self.rank] += 1
        if meeting.rounds[self.rank] == meeting.fails_at:
            raise RanksLost("the link is down")
        meeting.values[self.rank] = about, value
        meeting.barrier.wait()
        told = list(meeting.values)
        meeting.barrier.wait()
        assert len({about for about, _ in told}) == 1, told
        return [value for _, value in told]

    def leave(self, reason: str) -> None:
        self.left = reason


def train_together(machines: Sequence[Machine], controls: Sequence[Controller], steps: int) -> None:
    """Lets every rank train in a thread of its own."""
    threads = [
        threading.Thread(target=train, args=(machine, control, steps))
        for machine, control in zip(machines, controls, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def ranks_of(
    meeting: Meeting, touches: str = "model", **odd: Any
) -> tuple[list[Machine], list[Controller]]:
    """Ranks whose machines differ.

    Args:
        meeting: Where they meet.
        touches: What the bad action touches.
        odd: Properties of the good action on the last one.
    """
    machines = [Machine(seed=rank, base_ns=(60 + 30 * rank) * MS) for rank in range(meeting.num)]
    controls = []
    for rank, machine in enumerate(machines):
        good = Change(machine, "good", **{"factor": 0.6, **(odd if rank == meeting.num - 1 else {})})
        bad = Change(machine, "bad", factor=1.3, touches=touches)
        leads = [lead("good", speedup=2.0), lead("bad")] if rank == 0 else []
        controls.append(controller(machine, [good, bad], leads, ranks=Simulated(meeting, rank)))
    return machines, controls


def test_ranks_on_different_machines_come_to_the_same():
    machines, controls = ranks_of(Meeting(3))
    train_together(machines, controls, 600)
    for machine, control in zip(machines, controls, strict=True):
        assert machine.outcomes() == {"good": "kept", "bad": "reverted"}
        assert machine.factors == {"good": 0.6}
        assert control.state == "holding"
        assert machine.last("confirmation") == machines[0].last("confirmation")


def test_the_slowest_rank_decides():
    machines, controls = ranks_of(Meeting(2), factor=1.0)
    train_together(machines, controls, 600)
    assert machines[0].outcomes()["good"] != "kept", "rank 0 is faster with it, and waits for rank 1"


def test_a_better_fix_that_seems_too_dear_to_one_rank_waits_on_all():
    meeting, machines, controls = Meeting(2), [], []
    for rank in range(2):
        machine = Machine(seed=rank)
        one = Exclusive(machine, "one", factor=0.5, excludes=frozenset({"other"}))
        other = Exclusive(machine, "other", factor=0.2, settle_steps=1000, excludes=frozenset({"one"}))
        leads = [lead("one", speedup=3.0), lead("other", speedup=1.5)] if rank == 0 else []
        control = controller(machine, [one, other], leads, ranks=Simulated(meeting, rank))
        control._world.job.steps_left = lambda rank=rank: (10**6, 2000)[rank]
        machines.append(machine)
        controls.append(control)
    train_together(machines, controls, 1500)
    assert [control.state for control in controls] == ["holding", "holding"]
    assert [machine.factors for machine in machines] == [{"one": 0.5}, {"one": 0.5}]
    assert controls[0]._seeking._too_dear == controls[1]._seeking._too_dear == {"other"}


@pytest.mark.parametrize("touches, stays", [("model", False), ("ranks", True)])
def test_an_exchange_that_fails_leaves_all_ranks_with_the_same_in_force(touches, stays):
    """What is kept stays, and of what is tried only what all ranks must have alike."""
    frozen_in_force = set()
    for fails_at in range(1, 72):
        machines, controls = ranks_of(Meeting(2, fails_at), touches)
        train_together(machines, controls, 400)
        assert [control.state for control in controls] == ["frozen", "frozen"], fails_at
        assert machines[0].factors == machines[1].factors, fails_at
        assert machines[0].last("frozen") == machines[1].last("frozen")
        assert set(machines[0].last("frozen")["in_force"]) == set(machines[0].factors)
        frozen_in_force.add(tuple(machines[0].factors))
        for machine, control in zip(machines, controls, strict=True):
            control.finish()
            assert machine.factors == {}
    assert frozen_in_force == {(), ("good",)} | ({("good", "bad")} if stays else set())


@pytest.mark.parametrize("where", ["check", "prepare", "apply", "undo"])
def test_an_error_on_one_rank_undoes_all_on_every_rank(where):
    machines, controls = ranks_of(Meeting(2), fails_on=where)
    train_together(machines, controls, 400)
    for machine, control in zip(machines, controls, strict=True):
        assert control.state == "ended"
        assert machine.last("tuning_error")
    assert machines[0].factors == {}
    assert "rank 1: " in machines[0].last("tuning_error")["error"]


@pytest.mark.parametrize("where", ["prepare", "apply"])
def test_too_little_memory_on_one_rank_refuses_on_all(where):
    machines, controls = ranks_of(Meeting(2), fails_on=where, error=torch.OutOfMemoryError)
    train_together(machines, controls, 400)
    for machine in machines:
        assert machine.outcomes()["good"] == "refused"
        assert machine.trials()[0]["reason"] == "rank 1: there is too little memory to try it"
        assert machine.factors == {}
        assert "tuning_error" not in [kind for kind, _ in machine.told]


def test_a_refusal_on_one_rank_names_it():
    machines, controls = ranks_of(Meeting(2), refuses="there is no GPU")
    train_together(machines, controls, 400)
    for machine in machines:
        assert machine.trials()[0]["reason"] == "rank 1: there is no GPU"
        assert machine.outcomes()["good"] == "refused"


@dataclass
class Reluctant(Change):
    """Finds only while it is prepared that one of its settings cannot be applied."""

    not_with: int | None = None

    def prepare(self, job: Job, value: int | None) -> Any:
        if value == self.not_with:
            raise CannotApply("there is no room for it")
        return super().prepare(job, value)


@pytest.mark.parametrize("choices, not_with", [((None,), None), ((1, 2), 2)])
def test_a_refusal_of_one_rank_while_it_prepares_refuses_for_all_and_the_next_is_tried(choices, not_with):
    meeting, machines, controls, actions = Meeting(2), [], [], []
    for rank, kind in enumerate((Change, Reluctant)):
        machine = Machine(seed=rank)
        first = kind(machine, "first", factor=0.6, choices=choices)
        if isinstance(first, Reluctant):
            first.not_with = not_with
        leads = [lead("first", speedup=2.0), lead("next")] if rank == 0 else []
        second = Change(machine, "next", factor=0.8)
        controls.append(controller(machine, [first, second], leads, ranks=Simulated(meeting, rank)))
        machines.append(machine)
        actions.append(first)
    train_together(machines, controls, 600)
    for machine, control, action in zip(machines, controls, actions, strict=True):
        assert machine.outcomes() == {"first": "refused", "next": "kept"}
        assert machine.trials()[0]["reason"] == "rank 1: there is no room for it"
        assert machine.factors == {"next": 0.8}
        assert control.state == "holding"
        assert action.calls.count("prepare") == action.calls.count("unprepare")


@dataclass
class Even(Change):
    """An action that needs all ranks to have the same number of something."""

    number: int = 0

    def alike(self, prepared: Any) -> str:
        return f"{self.number} of them"


@pytest.mark.parametrize("numbers, outcome", [((7, 7, 7), "kept"), ((7, 7, 8), "refused")])
def test_what_needs_the_ranks_to_be_alike_is_refused_where_they_differ(numbers, outcome):
    meeting, machines, controls = Meeting(len(numbers)), [], []
    for rank, number in enumerate(numbers):
        machines.append(Machine(seed=rank))
        even = Even(machines[-1], "even", factor=0.6, number=number)
        leads = [lead("even")] if rank == 0 else []
        controls.append(controller(machines[-1], [even], leads, ranks=Simulated(meeting, rank)))
    train_together(machines, controls, 600)
    for machine in machines:
        (trial,) = machine.trials()
        assert trial["outcome"] == outcome
        assert outcome == "kept" or trial["reason"] == "ranks differ: rank 0: 7 of them; rank 2: 8 of them"


def test_only_settings_that_every_rank_can_use_are_tried():
    machines, controls = ranks_of(Meeting(2), choices=(1, 2))
    train_together(machines, controls, 400)
    assert machines[0].trials()[0]["reason"] == "there is no other value to try"


def test_what_fails_unseen_by_the_others_freezes():
    meeting = Meeting(2)
    machines, controls = ranks_of(meeting)

    def fails() -> None:
        raise OSError("on_step failed")

    controls[1]._world.job.on_step.append(fails)
    train(machines[1], controls[1], 50)
    assert controls[1].state == "frozen"
    assert "on_step failed" in machines[1].last("tuning_error")["error"]
    ranks = controls[1]._world.ranks
    assert isinstance(ranks, Simulated) and ranks.left == "something of ours failed"
    assert machines[1].stopped, "what fails in each step is not called for ever"


@pytest.mark.parametrize("spoiled_from", ["trial", "holding", "paused"])
def test_an_alarm_of_one_rank_undoes_the_change_on_all_at_the_same_step(spoiled_from):
    meeting = Meeting(2)
    machines = [Machine(seed=rank, base_ns=60 * MS) for rank in range(2)]
    trainings = [Training(machine) for machine in machines]
    controls = []
    for rank, (machine, training) in enumerate(zip(machines, trainings, strict=True)):
        lossy = Change(machine, "lossy", factor=0.6, safety=Safety.TRAINING)
        controls.append(
            controller(
                machine,
                [lossy],
                policy=Policy(allowed=frozenset({Safety.TRAINING})),
                ranks=Simulated(meeting, rank),
                losses=training.losses,
                snapshot=training.snapshot,
            )
        )
    if spoiled_from != "trial":
        train_together(machines, controls, 600)
        assert [set(machine.factors) for machine in machines] == [{"lossy"}] * 2
    if spoiled_from == "paused":
        controls[0]._world.commands.append(Command(command="pause-tuning"))
        train_together(machines, controls, 200)
        assert [control.state for control in controls] == ["paused"] * 2
    trainings[1].wrong = lambda: math.nan if machines[1].factors else None
    train_together(machines, controls, 400)
    assert [machine.factors for machine in machines] == [{}, {}]
    if spoiled_from == "trial":
        assert trainings[0].restored == trainings[1].restored != []
        assert machines[0].trials()[0]["outcome"] == "harmed"
        assert machines[0].trials()[0]["reason"].startswith("rank 1: the loss is nan; weights")
    else:
        assert machines[0].last("dropped") == {"action": "lossy", "reason": "rank 1: the loss is nan"}
    assert "tuning_error" not in [kind for machine in machines for kind, _ in machine.told]
