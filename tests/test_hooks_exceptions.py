"""Exceptions and interrupts: the script meets what it meets without the hooks."""

from __future__ import annotations

import gc
import io
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

from tests.fakes import FakeClock, SlowModel, SlowOptimizer, measured, one_step, steps_of

pytest_plugins = ("tests.group_of_one", "tests.training_loops")
pytestmark = pytest.mark.usefixtures("group_of_one")


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
