"""While tuning has nothing to do, steps pass without it: the hooks look at nothing but the time."""

from __future__ import annotations

import itertools
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions._losses import Losses
from diagnose.actions.base import Action
from diagnose.core.command import Command
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._curious import CURIOUS_UNTIL
from diagnose.hooks._recorder import Recorder
from diagnose.launch.tuning import LOSS_STEPS, LiveTuning
from diagnose.tuner.installed import Installed
from tests.test_run_tuning import NOTHING_ASKED

OPTIMIZER = 1


def step_with_a_loader(recorder: Recorder) -> bool:
    """Returns whether the hooks looked at the time alone."""
    recorder.batch_asked()
    recorder.samples += 8
    recorder.calm = recorder.calm_when_told
    looked_away = bool(recorder.calm)
    if not looked_away:
        recorder.work_begins()
    recorder.backward_passes += 1
    recorder.optimizer_stepped(OPTIMIZER)
    return looked_away


def step_without_one(recorder: Recorder) -> bool:
    recorder.work_begins()
    recorder.backward_passes += 1
    recorder.optimizer_stepped(OPTIMIZER)
    return False


def called_at(step: Callable[[Recorder], bool], every: int) -> tuple[list[int], list[bool]]:
    """Returns after which of 200 steps who rests for `every` was called, and in which all looked away."""
    recorder, calls = Recorder(), list[int]()

    def boundary() -> None:
        calls.append(recorder.steps)
        recorder.rest_until(recorder.steps + every)

    recorder.on_boundary = boundary
    return calls, [step(recorder) for _ in range(200)]


def test_who_rests_is_not_called_and_the_hooks_look_away():
    calls, looked_away = called_at(step_with_a_loader, 10)
    assert calls == list(range(calls[0], 200, 10))
    calm = looked_away[CURIOUS_UNTIL + 2 :]
    assert sum(calm) >= len(calm) - len(calls)


def test_who_does_not_rest_is_called_after_each_step_and_nothing_looks_away():
    calls, looked_away = called_at(step_with_a_loader, 1)
    assert calls == list(range(calls[0], 200))
    assert not any(looked_away)


def test_a_loop_without_a_loader_lets_steps_pass_too():
    calls, _ = called_at(step_without_one, 10)
    assert len(calls) in (19, 20)
    assert {later - earlier for earlier, later in itertools.pairwise(calls)} == {10}


def test_tuning_that_rests_is_asked_now_and_then_and_a_command_at_the_next_step(tmp_path):
    recorder = Recorder()
    tuning = LiveTuning(recorder, tmp_path, NOTHING_ASKED)
    try:
        looked = list[int]()
        boundary = recorder.on_boundary
        assert boundary is not None
        for _ in range(16):
            step_with_a_loader(recorder)
            looked.append(recorder.boundary_due)
        assert max(due - number for number, due in enumerate(looked)) <= LOSS_STEPS + 1
        assert len(set(looked)) < len(looked) / 2, "it does not rest"
        while recorder.boundary_due <= recorder.steps + 2:
            step_with_a_loader(recorder)
        assert tuning.command(Command(command="pause-tuning")) == ""
        step_with_a_loader(recorder)
        assert tuning._controller.state == "paused"
    finally:
        tuning.finish()
    assert recorder.on_boundary is None and recorder.boundary_due == 0


@contextmanager
def resting(folder: Path, on_step: list[Callable[[], None]]) -> Iterator[tuple[Recorder, LiveTuning]]:
    """A job that is tuned, whose steps are counted by those functions."""
    recorder = Recorder()
    tuning = LiveTuning(recorder, folder, NOTHING_ASKED)
    try:
        tuning._job.on_step.extend(on_step)
        for _ in range(CURIOUS_UNTIL + 2):
            step_with_a_loader(recorder)
        yield recorder, tuning
    finally:
        tuning._job.on_step.clear()
        tuning.finish()


@pytest.mark.parametrize("counted", [False, True])
def test_while_tuning_rests_the_loss_is_not_always_that_of_the_same_turn(tmp_path, counted):
    """Of two networks that take turns, or of a batch of a short epoch that is not shuffled."""
    with resting(tmp_path, [lambda: None] if counted else []) as (recorder, tuning):
        read = []
        for _ in range(600):
            if recorder.steps + 1 >= tuning._until:
                read.append(recorder.steps)
            step_with_a_loader(recorder)
    assert len(read) < 600 / 4
    for length in (2, 3, 4, 5, 6, 8, 10, 16, 20, 32):
        assert len({step % length for step in read}) == length, f"of epochs of {length} batches"


def test_who_counts_steps_is_called_after_each_while_the_hooks_look_away(tmp_path):
    called: list[tuple[int, int]] = []
    count = lambda: called.append((tuning._job.steps, tuning._job.backward_passes))  # noqa: E731
    with resting(tmp_path, []) as (recorder, tuning):
        tuning._job.on_step.append(count)  # as an action does where tuning looks
        recorder.boundary_due, first = 0, recorder.steps + 1  # it ends as the next batch is asked for
        looked_away = [step_with_a_loader(recorder) for _ in range(200)]
        assert called == [(step, step) for step in range(first, first + 200)]
        assert sum(looked_away) > 200 * 0.7
        while recorder.steps + 2 >= tuning._until:
            step_with_a_loader(recorder)
        assert tuning._controller._course.step.number < recorder.steps, "it does not rest"
        assert tuning.command(Command(command="pause-tuning")) == ""
        step_with_a_loader(recorder)
        assert tuning._controller._course.step.number == recorder.steps, "a command wakes it"


def test_ctrl_c_does_not_interrupt_who_counts_steps(tmp_path):
    """What half a call leaves behind other ranks would not know of."""
    whole: list[int] = []

    def count() -> None:
        signal.raise_signal(signal.SIGINT)
        whole.append(1)

    with resting(tmp_path, []) as (recorder, tuning):
        while recorder.steps + 2 >= tuning._until:
            step_with_a_loader(recorder)
        tuning._job.on_step.append(count)
        recorder.boundary_due = 0
        with pytest.raises(KeyboardInterrupt):
            step_with_a_loader(recorder)
        assert whole == [1]


def test_ctrl_c_between_two_steps_keeps_nothing_alive_that_the_script_drops_then(tmp_path):
    with resting(tmp_path, []) as (recorder, tuning):
        model = nn.Linear(2, 2)
        recorder.met.model_appears(model)
        alive = weakref.ref(model)
        tuning._job.on_step.append(lambda: signal.raise_signal(signal.SIGINT))
        assert tuning.command(Command(command="pause-tuning")) == ""
        with pytest.raises(KeyboardInterrupt):
            step_with_a_loader(recorder)
        del model
        assert alive() is None


class Leaves(Action):
    """An action that leaves something behind."""

    safety = Safety.EXACT
    left = 0

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        self.left += 1
        yield

    def state(self, job: Job) -> Any:
        return self.left


def test_what_fails_after_a_step_while_tuning_rests_is_undone_and_looked_after_as_ever(tmp_path):
    model = nn.Linear(2, 2)
    with resting(tmp_path, []) as (recorder, tuning):
        recorder.met.model_appears(model)
        tuning._look()
        tuning._controller._changes.kept.append(Installed("leaves", Leaves(), tuning._job, None))
        tuning._controller._changes.kept[0].switch(True)
        tuning._forget()
        while recorder.steps + 2 >= tuning._until:
            step_with_a_loader(recorder)
        tuning._job.on_step.append(lambda: [][0])
        recorder.boundary_due = 0
        step_with_a_loader(recorder)
        assert tuning._controller.state == "ended" and tuning._job.models == []
    errors = [detail["error"] for *_, kind, detail in recorder.events if kind == "tuning_error"]
    assert len(errors) == 2 and "IndexError" in errors[0] and "Leaves was not undone" in errors[1]


def test_the_loss_of_a_step_that_nobody_asks_after_is_not_noted():
    weight, wanted = torch.ones(3, requires_grad=True), False
    losses = Losses(lambda function, *args: function(*args), lambda: wanted)
    with losses.noted():
        weight.sum().backward()
        assert losses.step_ended() == []
        wanted = True
        (weight.sum() * 2).backward()
        assert losses.step_ended() == [6.0]
