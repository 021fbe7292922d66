"""Failures of our own stay ours: they are noted, and the script goes on."""

from __future__ import annotations

import io
import os
import signal
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from diagnose.hooks._met import Met
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import around, spanned
from tests.fakes import SlowData, SlowModel, SlowOptimizer, measured

pytest_plugins = ("tests.group_of_one", "tests.training_loops")
pytestmark = pytest.mark.usefixtures("group_of_one")


TELLS = [
    (cls, name)
    for cls in (Recorder, Met)
    for name, value in vars(cls).items()
    if callable(value)
    and not name.startswith("_")
    and name not in ("broke", "guarded", "reset", "push", "leave", "finish")
    and name not in ("clear", "live_modules", "live_optimizers")
    and name
    not in ("on_training_thread", "switch_off", "run_into", "claim_thread", "step_marked", "unmeasured")
    and name != "rest_until"  # of the tuner
    and name not in ("tell_stepped_beside", "arrive")  # of DDP: see test_ddp_waits
]
"""What hooks tell the recorder."""


@pytest.mark.parametrize(("cls", "method"), TELLS)
def test_a_failure_of_our_own_is_noted_and_the_script_goes_on(clock, monkeypatch, cls, method):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise LookupError(f"{method} is broken")

    monkeypatch.setattr(cls, method, fail)
    with measured(clock) as recorder:
        model = SlowModel(clock, 1, 1)
        optimizer = SlowOptimizer(clock, model, 1)
        weights = [parameter.clone() for parameter in model.parameters()]
        loader = DataLoader(SlowData(clock, num_rows=4, fetch_ns=1), batch_size=2)
        for rows in [*loader, *iter(loader), torch.ones(2, 4), torch.ones(2, 4)]:
            optimizer.zero_grad()
            model(rows).sum().backward()
            optimizer.step()
            torch.save({}, io.BytesIO())
            model.eval()
            with torch.no_grad():
                model(rows)
            model.train()
        # Where no optimizer can be heard, steps are told by what it does.
        notes = [note for note in recorder.notes if "the parameters change" not in note]
    assert all(not torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert notes, "it was called, and the report says that it failed"
    assert all("measuring failed in " in note and f"{method} is broken" in note for note in notes)
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (Met, "site"),
        *((Recorder, method) for method in ("batch_asked", "optimizer_stepped", "evaluation_begins")),
    ],
)
def test_what_a_signal_handler_of_the_scripts_raises_in_our_code_reaches_the_script(
    clock, monkeypatch, cls, method
):
    class Late(Exception):
        pass

    def ring(number: int, frame: object) -> None:
        raise Late

    def in_our_code(*args: Any) -> None:
        os.kill(os.getpid(), signal.SIGALRM)

    model = SlowModel(clock)
    optimizer = SlowOptimizer(clock, model, step_ns=1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        with measured(clock) as recorder:
            monkeypatch.setattr(cls, method, in_our_code)
            with pytest.raises(Late):
                for rows in DataLoader(SlowData(clock, num_rows=4, fetch_ns=1)):
                    model(rows).sum().backward()
                    optimizer.step()
                    with torch.no_grad():
                        model(rows)
            assert not recorder.notes
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_look_at_a_pass_that_fails_silences_no_other(clock):
    def fail(args: tuple[Any, ...]) -> None:
        raise LookupError("this look is broken")

    seen: list[tuple[Any, ...]] = []
    with measured(clock, "backward") as recorder:
        recorder.looks.on_backward += [fail, seen.append]
        recorder.looks.on_pass += [fail, seen.append]
        loss = SlowModel(clock)(torch.ones(2, 4)).sum()
        loss.backward()
        assert [args[0] is loss for args in seen] == [True, True]
        assert ["this look is broken" in note for note in recorder.notes] == [True]


def test_a_wrapped_function_gets_its_arguments_and_its_result_comes_back(clock):
    seen: list[Any] = []

    def function(*args: Any, **kwargs: Any) -> object:
        seen.append((args, kwargs))
        return kwargs

    with measured(clock, "checkpoint") as recorder:
        wrapped = spanned(function, recorder, lambda args, kwargs: 0)
        result = wrapped(1, two=2)
    assert seen == [((1,), {"two": 2})]
    assert result is seen[0][1] or result == {"two": 2}


def test_what_is_called_around_a_call_gets_its_arguments_and_its_result():
    told: list[Any] = []
    double = around(
        lambda number, by=2: number * by,
        lambda args, kwargs: told.append((args, kwargs)),
        lambda args, result: told.append((args, result)),
    )
    assert double(3, by=4) == 12
    assert told == [((3,), {"by": 4}), ((3,), 12)]
