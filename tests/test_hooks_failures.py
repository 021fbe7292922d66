"""Exceptions, warnings and failures of our own: the script meets what it meets without the hooks."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from diagnose.hooks._met import Met
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import around, spanned
from tests.fakes import FakeClock, SlowData, SlowModel, SlowOptimizer, measured, one_step, steps_of
from tests.hook_calls import group_of_one  # noqa: F401 (a fixture)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


# -- exceptions pass through as they are


def fails_in_the_dataset() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise OSError("no such image")

    next(iter(DataLoader(Broken())))


def fails_in_a_transform_that_is_a_module() -> None:
    class Crop(nn.Module):
        def forward(self, row: torch.Tensor) -> torch.Tensor:
            raise ValueError("the image is too small")

    class Cropped(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            return nn.Sequential(Crop())(torch.ones(1))

    next(iter(DataLoader(Cropped())))


def fails_in_collate() -> None:
    next(iter(DataLoader([torch.ones(1), torch.ones(2)], batch_size=2)))


def fails_in_a_collate_of_the_users() -> None:
    def collate(rows: Any) -> Any:
        raise KeyError("label")

    next(iter(DataLoader([1, 2], batch_size=2, collate_fn=collate)))


def fails_in_the_loader() -> None:
    DataLoader([1, 2], num_workers=1, multiprocessing_context="fork", timeout=-1)


def fails_in_forward() -> None:
    nn.Sequential(nn.Linear(4, 2), nn.Linear(3, 1))(torch.ones(1, 4))


def fails_in_the_arguments_of_forward() -> None:
    nn.Linear(4, 2)(torch.ones(1, 4), mask=None)


def fails_in_backward() -> None:
    torch.ones(1).backward()


def fails_in_a_function_of_the_users_in_backward() -> None:
    weight = torch.ones(1, requires_grad=True) * 2
    weight.register_hook(lambda gradient: 1 / 0)
    weight.backward()


def fails_in_autograd_grad() -> None:
    torch.autograd.grad(torch.ones(1), torch.ones(1))


def fails_in_an_optimizer_step() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    del optimizer.param_groups[0]["lr"]
    optimizer.step()


def fails_in_a_closure() -> None:
    def closure() -> float:
        raise RuntimeError("the loss is gone")

    torch.optim.LBFGS([nn.Parameter(torch.ones(2))]).step(closure)


def fails_in_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1))


def fails_in_clipping() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), float("nan"))
    torch.nn.utils.clip_grad_norm_([parameter], 1.0, error_if_nonfinite=True)


def fails_in_a_schedule() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer.step()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 - epoch))
    schedule.step()


def fails_in_saving() -> None:
    torch.save(threading.Lock(), io.BytesIO())


def fails_in_saving_to_a_missing_folder() -> None:
    torch.save({}, "/no such folder/checkpoint")


def fails_in_saving_safetensors() -> None:
    import safetensors.torch

    safetensors.torch.save_file({"weight": 1}, "/no such folder/weights")


def fails_in_saving_sharded_state() -> None:
    from torch.distributed import checkpoint

    checkpoint.save({})


def fails_in_a_collective() -> None:
    import torch.distributed as dist

    dist.all_reduce("text")


def fails_in_switching_to_evaluation() -> None:
    nn.Linear(1, 1).train("yes")


def fails_in_making_a_loader() -> None:
    DataLoader([0], batch_size=-1)


def fails_in_making_an_optimizer() -> None:
    torch.optim.SGD([], lr=0.1)


def fails_in_making_a_process_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # another is there


def fails_in_making_a_model_of_several_ranks() -> None:
    nn.parallel.DistributedDataParallel(nn.ReLU())


FAILURES = [f for name, f in list(globals().items()) if name.startswith("fails_in_")]


def traceback_of(call: Callable[[], None]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception:  # noqa: BLE001 (its traceback is what is tested)
            return traceback.format_exc()
    raise AssertionError(f"{call.__name__} did not fail")


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="Python 3.10 adds a frame again when it is re-raised"
)
@pytest.mark.parametrize("call", FAILURES)
def test_an_exception_has_the_traceback_that_it_has_without_us(clock, call):
    if call is fails_in_saving_safetensors:
        pytest.importorskip("safetensors")
    plain = traceback_of(call)
    with measured(clock) as recorder:
        assert traceback_of(call) == plain, "the first time"
        assert traceback_of(call) == plain, "once the classes of models are known"
        assert not recorder.notes


@pytest.mark.parametrize("call", FAILURES)
def test_time_goes_on_in_a_gap_after_an_exception(clock, call):
    if call is fails_in_saving_safetensors:
        pytest.importorskip("safetensors")
    with measured(clock) as recorder, one_step(recorder) as step:
        traceback_of(call)
        clock.spend(1)
        SlowModel(clock, forward_ns=4)(torch.ones(1, 4))
        clock.spend(2)
    assert step.times.pop("forward") == 4
    # Nothing tells that an optimizer step has failed until the loop goes on.
    left_open = {"fails_in_an_optimizer_step", "fails_in_a_closure"}
    slots = {"gap_after_forward", *(["optimizer"] if call.__name__ in left_open else [])}
    assert all(slot.startswith("gap_") or slot in slots for slot in step.times), step.times
    assert sum(step.times.values()) == 3


def test_exceptions_that_are_no_errors_pass_through(clock):
    class Model(nn.Module):
        def forward(self, error: type[BaseException]) -> None:
            raise error

    with measured(clock):
        for error in (KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration):
            with pytest.raises(error):
                Model()(error)


class Interrupted(FakeClock):
    """Ctrl-C comes at one of its readings."""

    left = 10**9

    def __call__(self) -> int:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return super().__call__()


@pytest.fixture
def no_collections() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("reading", range(1, 9))
def test_an_interrupt_that_lands_in_our_own_code_is_still_an_interrupt(reading, no_collections):
    """Ctrl-C comes between any two instructions; the calls of the clock stand for all of them."""
    clock = Interrupted()
    model = SlowModel(clock, 1, 1)
    optimizer = SlowOptimizer(clock, model, 1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    with measured(clock) as recorder:
        step()
        clock.left = reading
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                step()
        for _ in range(3):
            step()
        recorder.finish()
        assert not recorder.notes
    assert all(time_ns >= 0 for step in steps_of(recorder) for time_ns in step.times.values())


@pytest.mark.parametrize("reading", [1, 2])
def test_an_interrupt_that_lands_in_what_the_collector_calls_is_still_an_interrupt(reading, no_collections):
    """The collector itself prints what its callbacks raise, and goes on."""
    clock = Interrupted()
    with measured(clock):
        clock.left = reading
        with pytest.raises(KeyboardInterrupt):
            gc.collect()
            time.sleep(10)


# -- warnings point where they point without us


def lines_warned(call: Callable[[], Any]) -> list[tuple[str, int, str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [(w.filename, w.lineno, str(w.message)) for w in caught]


def warns_in_a_dataset(level: int) -> None:
    class Rows(Dataset[Any]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            warnings.warn("mind the step", stacklevel=level)
            return 1

    next(iter(DataLoader(Rows())))


def warns_in_collate(level: int) -> None:
    def collate(rows: Any) -> int:
        warnings.warn("mind the step", stacklevel=level)
        return 1

    next(iter(DataLoader([1], collate_fn=collate)))


def warns_in_forward(level: int) -> None:
    class Model(nn.Module):
        def forward(self) -> None:
            warnings.warn("mind the step", stacklevel=level)

    Model()()


def warns_in_a_call_of_the_users(level: int) -> None:
    class Model(nn.Module):
        def __call__(self) -> None:
            warnings.warn("mind the step", stacklevel=level)

    Model()()


def warns_in_switching(level: int) -> None:
    class Model(nn.Module):
        def children(self) -> Any:
            warnings.warn("mind the step", stacklevel=level)
            return []

    Model().train()


def warns_in_a_step(level: int) -> None:
    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            warnings.warn("mind the step", stacklevel=level)

    Optimizer([nn.Parameter(torch.ones(1))], lr=0.1).step()


def warns_in_a_closure(level: int) -> None:
    def closure() -> float:
        warnings.warn("mind the step", stacklevel=level)
        return 0.0

    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step(closure)


def warns_in_a_schedule(level: int) -> None:
    def factor(epoch: int) -> float:
        warnings.warn("mind the step", stacklevel=level)
        return 1.0

    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.step()
    torch.optim.lr_scheduler.LambdaLR(optimizer, factor).step()


def warns_in_clipping(level: int) -> None:
    def parameters() -> Iterator[Any]:
        warnings.warn("mind the step", stacklevel=level)
        yield nn.Parameter(torch.ones(1))

    torch.nn.utils.clip_grad_norm_(parameters(), 1.0)


def warns_in_saving(level: int) -> None:
    class State:
        def __reduce__(self) -> Any:
            warnings.warn("mind the step", stacklevel=level)
            return (list, ())

    torch.save(State(), io.BytesIO())


WARNINGS = [f for name, f in list(globals().items()) if name.startswith("warns_in_")]


@pytest.mark.parametrize("level", [1, 2, 3, 4])
@pytest.mark.parametrize("call", WARNINGS)
def test_a_warning_points_at_the_line_that_it_points_at_without_us(clock, call, level):
    def warn() -> None:
        call(level)

    plain = lines_warned(warn)
    assert "mind the step" in [message for _, _, message in plain]
    with measured(clock):
        assert lines_warned(warn) == plain, "the first time"
        assert lines_warned(warn) == plain


def test_torch_warns_of_a_schedule_before_the_first_step_as_it_does_without_us(clock):
    def wrong_order() -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1).step()

    plain = lines_warned(wrong_order)
    assert len(plain) == 1
    with measured(clock):
        assert lines_warned(wrong_order) == plain


# -- our own failures stay ours


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
