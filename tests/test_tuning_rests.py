"""While tuning has nothing to do, steps pass without it: the hooks look at nothing but the time."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

from diagnose.actions._losses import Losses
from diagnose.core.command import Command
from diagnose.hooks._curious import CURIOUS_UNTIL
from diagnose.hooks._recorder import Recorder
from diagnose.launch.tuning import LOSS_STEPS, LiveTuning
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


def called_at(step: Callable[[Recorder], bool], every: int, steps: int) -> tuple[list[int], list[bool]]:
    """Returns after which steps who rests for `every` steps was called, and in which all looked away."""
    recorder, calls = Recorder(), list[int]()

    def boundary() -> None:
        calls.append(recorder.steps)
        recorder.rest_until(recorder.steps + every)

    recorder.on_boundary = boundary
    return calls, [step(recorder) for _ in range(steps)]


def test_who_rests_is_not_called_and_the_hooks_look_away():
    calls, looked_away = called_at(step_with_a_loader, 10, 200)
    assert calls == list(range(calls[0], 200, 10))
    calm = looked_away[CURIOUS_UNTIL + 2 :]
    assert sum(calm) >= len(calm) - len(calls)


def test_who_does_not_rest_is_called_after_each_step_and_nothing_looks_away():
    calls, looked_away = called_at(step_with_a_loader, 1, 200)
    assert calls == list(range(calls[0], 200))
    assert not any(looked_away)


def test_a_loop_without_a_loader_lets_steps_pass_too():
    calls, _ = called_at(step_without_one, 10, 200)
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


def test_the_loss_of_a_step_that_nobody_asks_after_is_not_noted():
    weight, wanted = torch.ones(3, requires_grad=True), False
    losses = Losses(lambda function, *args: function(*args), lambda: wanted)
    with losses.noted():
        weight.sum().backward()
        assert losses.step_ended() == []
        wanted = True
        (weight.sum() * 2).backward()
        assert losses.step_ended() == [6.0]
