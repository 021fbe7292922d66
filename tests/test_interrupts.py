"""Ctrl-C while the tuner changes something."""

from __future__ import annotations

import os
import signal
import sys
import threading
import timeit
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diagnose.actions._watch import watched
from diagnose.core.trial import Safety
from diagnose.launch.interrupts import handlers_wait, interrupts_wait
from diagnose.launch.tuning import _check_numerics
from tests.checked_training import ConvNet, trained
from tests.simulated_job import Change, Machine, controller, lead, train
from tests.toggled import assert_equal, weights


def test_ctrl_c_comes_when_the_change_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), interrupts_wait():
        os.kill(os.getpid(), signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_scripts_own_handler_is_called_once_and_stays():
    calls = []

    def handler(number, frame):
        calls.append(number)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts_wait():
            os.kill(os.getpid(), signal.SIGINT)
            assert calls == []
        assert calls == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_set_meanwhile_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with interrupts_wait():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class Preempted(Exception):
    """What a script raises when it is told to make room."""


@pytest.fixture
def preempting() -> Iterator[list[int]]:
    """The script's handler of a signal raises, unless it is told not to."""
    calls: list[int] = []

    def handler(number: int, frame: object) -> None:
        calls.append(number)
        if len(calls) == 1:
            raise Preempted

    before = signal.signal(signal.SIGUSR1, handler)
    yield calls
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)


def test_what_another_handler_raises_is_for_nobody_inside(preempting):
    seen = []
    with pytest.raises(Preempted), interrupts_wait():
        try:
            os.kill(os.getpid(), signal.SIGUSR1)
        except Exception as error:  # noqa: BLE001 (as our own code does)
            seen.append(error)
    assert (seen, preempting) == ([], [signal.SIGUSR1])


def test_what_it_raises_where_python_swallows_it_is_raised_in_the_end(preempting, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    done = []

    class Goes:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Preempted), interrupts_wait():
        Goes()
        done.append("all of it")
    assert done == ["all of it"]


def test_a_handler_that_raises_nothing_runs_at_once(preempting):
    preempting.append(0)
    with interrupts_wait():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert preempting == [0, signal.SIGUSR1]


def test_handlers_that_are_put_off_run_once_when_they_may_and_each_of_them(preempting):
    other, seen = [], []
    before = signal.signal(signal.SIGUSR2, lambda *_: other.append(signal.SIGUSR2))
    try:
        with pytest.raises(Preempted), interrupts_wait():
            with handlers_wait():
                for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1):
                    os.kill(os.getpid(), number)
                assert (preempting, other) == ([], [])
                seen.append("all of it")
            seen.append("what comes after an exception")
        assert (preempting, other, seen) == ([signal.SIGUSR1], [signal.SIGUSR2], ["all of it"])
        with interrupts_wait():
            os.kill(os.getpid(), signal.SIGUSR2)
            assert len(other) == 2
    finally:
        signal.signal(signal.SIGUSR2, before)


to_send: list[int] = []


class Rung(ConvNet):
    """A signal arrives in the middle of its call."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        output = super().forward(images)
        while to_send:
            os.kill(os.getpid(), to_send.pop())
        return output


def test_what_a_handler_saves_during_the_check_is_what_the_script_has():
    """The check's own calls of the model move buffers and generators, and put them back."""
    training, saved = trained(Rung, dropout=0.5), []
    model = training.model

    def state() -> tuple[int, list[torch.Tensor], torch.Tensor]:
        return model.calls, weights(model), torch.get_rng_state()

    installed: Any = SimpleNamespace(
        context=nullcontext, action=SimpleNamespace(touches="model", safety=Safety.ROUNDING)
    )
    before = signal.signal(signal.SIGUSR1, lambda *_: saved.append(state()))
    try:
        with watched(training.job):
            training.step()
            own = state()
            to_send.append(signal.SIGUSR1)
            with interrupts_wait():
                assert _check_numerics(training.job, installed).ok
    finally:
        signal.signal(signal.SIGUSR1, before)
    ((calls, tensors, generator),) = saved
    assert calls == own[0]
    assert_equal(tensors, own[1])
    assert torch.equal(generator, own[2])


def test_in_a_forked_process_a_handler_raises_what_it_raises(preempting):
    with interrupts_wait():
        child = os.fork()
        if not child:
            try:
                os.kill(os.getpid(), signal.SIGUSR1)
            except Preempted:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@dataclass
class Signalled(Change):
    """An action in the middle of which a signal arrives."""

    at: str = ""

    def _call(self, what: str) -> None:
        super()._call(what)
        if what == self.at:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.mark.parametrize("at", ["check", "prepare", "apply", "undo", "unprepare"])
def test_a_script_that_survives_what_its_handler_raised_goes_on_without_the_tuning(preempting, at):
    machine = Machine()
    fine, other = Change(machine, "fine", factor=0.5), Signalled(machine, "other", factor=0.9, at=at)
    control = controller(machine, [fine, other], [lead("fine", speedup=3.0), lead("other")])
    caught = 0
    for _ in range(1000):
        try:
            with interrupts_wait():
                train(machine, control, 1)
        except Preempted:
            caught += 1
    with interrupts_wait():
        control.finish()
    assert (caught, preempting[0]) == (1, signal.SIGUSR1)
    assert "tuning_error" not in [kind for kind, _ in machine.told]
    assert (control.state, machine.stopped, "fine" in machine.factors) == ("ended", 1, False)


def test_an_interrupted_way_back_leaves_nothing_else_in_force(preempting):
    machine = Machine()
    actions = [Change(machine, "a", factor=0.5), Signalled(machine, "b", factor=0.5, at="unprepare")]
    control = controller(machine, actions)
    train(machine, control, 1000)
    assert set(machine.factors) == {"a", "b"}
    with pytest.raises(Preempted), interrupts_wait():
        control.finish()
    assert machine.factors == {}
    assert [each.calls.count("unprepare") for each in actions] == [1, 1]


def test_in_another_thread_nothing_is_touched():
    seen = []

    def look():
        with interrupts_wait():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


def test_it_costs_less_than_the_calls_of_the_signal_module_that_it_stands_for():
    """It is entered in every step of a tuned run."""

    def waits() -> None:
        with interrupts_wait():
            pass

    def calls() -> None:
        for _ in range(2):
            signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))

    taken = [(timeit.timeit(waits, number=200), timeit.timeit(calls, number=200)) for _ in range(40)]
    assert min(ours for ours, _ in taken) < min(theirs for _, theirs in taken), (
        "by half where nothing else runs"
    )
