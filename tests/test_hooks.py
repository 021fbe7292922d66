"""Every hook: times the right calls, changes nothing, and leaves no trace."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import replaced, spanned
from tests.conftest import torch_attributes
from tests.fakes import HOOKS, FakeClock, SlowData, SlowModel, SlowOptimizer, measured, one_step, steps_of

Call = Callable[[FakeClock], None]

replacing = pytest.mark.parametrize("name", sorted(HOOKS))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module", autouse=True)
def group_of_one() -> Iterator[None]:
    """A process group in which collectives can be called."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class SlowList(list[Any]):
    """A list that takes some time to walk through."""

    def __init__(self, clock: FakeClock, items: Any, time_ns: int) -> None:
        super().__init__(items)
        self.clock, self.time_ns = clock, time_ns

    def __iter__(self) -> Iterator[Any]:
        self.clock.spend(self.time_ns)
        return super().__iter__()


class SlowToPickle:
    def __init__(self, clock: FakeClock, time_ns: int) -> None:
        self.clock, self.time_ns = clock, time_ns

    def __reduce__(self) -> Any:
        self.clock.spend(self.time_ns)
        return (list, ())


# -- what each hook charges: calls that take a known time, and the slots that it belongs to


def asks_a_loader(clock: FakeClock) -> None:
    for _ in DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2):
        clock.spend(3)


def asks_a_loader_without_gradients(clock: FakeClock) -> None:
    with torch.no_grad():
        for _ in DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2):
            clock.spend(3)


def asks_a_loader_that_asks_another(clock: FakeClock) -> None:
    class Outer(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            clock.spend(1)
            return next(iter(DataLoader(SlowData(clock, num_rows=1, fetch_ns=5))))

    for _ in DataLoader(Outer()):
        clock.spend(3)


def calls_a_model(clock: FakeClock) -> None:
    model = nn.Sequential(SlowModel(clock, forward_ns=4), SlowModel(clock, forward_ns=6))
    model[1].layer = nn.Linear(1, 1)
    model(torch.ones(2, 4))
    clock.spend(1)
    nn.MSELoss()(torch.ones(2), torch.ones(2))
    clock.spend(2)


def calls_a_submodule_first(clock: FakeClock) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = SlowModel(clock, forward_ns=4)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            clock.spend(1)
            return self.part(rows)

    model = Model()
    for _ in range(3):
        model.part(torch.ones(2, 4))
        model(torch.ones(2, 4))
        clock.spend(2)


def calls_a_model_without_gradients(clock: FakeClock) -> None:
    model = SlowModel(clock, forward_ns=4)
    with torch.no_grad():
        model(torch.ones(2, 4))
        clock.spend(2)
        model(torch.ones(2, 4))
    with torch.inference_mode():
        clock.spend(2)
        model(torch.ones(2, 4))


def calls_a_model_that_fails(clock: FakeClock) -> None:
    class Model(nn.Module):
        def forward(self) -> None:
            clock.spend(4)
            raise ValueError

    with pytest.raises(ValueError):
        Model()()
    clock.spend(1)


def result_of(clock: FakeClock, time_ns: int) -> torch.Tensor:
    result = torch.ones(1, requires_grad=True) * 2
    result.register_hook(lambda gradient: clock.spend(time_ns))
    return result


def goes_backward(clock: FakeClock) -> None:
    result_of(clock, 7).backward()
    clock.spend(1)
    torch.autograd.backward([result_of(clock, 8)])
    weight = torch.ones(1, requires_grad=True)
    loss = weight * 2
    loss.register_hook(lambda gradient: clock.spend(9))
    torch.autograd.grad(loss, weight)


def goes_backward_within_backward(clock: FakeClock) -> None:
    class Checkpointed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            clock.spend(3)
            with torch.enable_grad():
                result_of(clock, 7).backward()
            clock.spend(2)
            return gradient

    Checkpointed.apply(torch.ones(1, requires_grad=True)).backward()
    clock.spend(1)


def goes_backward_and_fails(clock: FakeClock) -> None:
    result = result_of(clock, 7)
    result.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        result.backward()
    clock.spend(1)


def steps_an_optimizer(clock: FakeClock) -> None:
    optimizer = SlowOptimizer(clock, SlowModel(clock), step_ns=7)
    optimizer.step()
    clock.spend(1)

    def closure() -> float:
        clock.spend(20)
        return 0.0

    optimizer.step(closure)
    optimizer.step(closure=closure)
    clock.spend(2)


def steps_an_optimizer_that_fails(clock: FakeClock) -> None:
    optimizer = SlowOptimizer(clock, SlowModel(clock), step_ns=7)
    with pytest.raises(TypeError):
        optimizer.step(lambda: 1 + None)
    clock.spend(5)  # torch calls nothing of ours where a step fails
    optimizer.step()
    clock.spend(1)


def clears_clips_and_schedules(clock: FakeClock) -> None:
    model = SlowModel(clock)
    optimizer = SlowOptimizer(clock, model, step_ns=0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    scheduler.lr_lambdas = SlowList(clock, scheduler.lr_lambdas, 5)
    optimizer.param_groups = SlowList(clock, optimizer.param_groups, 3)
    optimizer.zero_grad()
    clock.spend(1)
    model.zero_grad()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.nn.utils.clip_grad_norm_(SlowList(clock, model.parameters(), 7), 1.0)
    torch.nn.utils.clip_grad_value_(SlowList(clock, model.parameters(), 11), 1.0)
    clock.spend(2)


def scales_gradients(clock: FakeClock) -> None:
    model = SlowModel(clock)
    optimizer = SlowOptimizer(clock, model, step_ns=7)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    optimizer.param_groups = SlowList(clock, optimizer.param_groups, 3)
    scaler.unscale_(optimizer)
    optimizer.param_groups = optimizer.param_groups[:]  # which takes no time
    clock.spend(1)
    scaler.step(optimizer)
    scaler.update()
    clock.spend(2)


def saves_state(clock: FakeClock) -> None:
    torch.save(SlowToPickle(clock, 9), io.BytesIO())
    clock.spend(1)
    torch.serialization.save(SlowToPickle(clock, 8), io.BytesIO())
    clock.spend(1)


def saves_sharded_state(clock: FakeClock) -> None:
    from torch.distributed import checkpoint

    class App:
        def state_dict(self) -> dict[str, Any]:
            clock.spend(9)
            return {"weight": torch.ones(2)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    class Nowhere(checkpoint.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            clock.spend(4)
            torch.save(SlowToPickle(clock, 2), io.BytesIO())
            future: Any = torch.futures.Future()
            future.set_result([])
            return future

        def finish(self, metadata: Any, results: Any) -> None:
            pass

        def reset(self, checkpoint_id: Any = None) -> None:
            pass

        def prepare_local_plan(self, plan: Any) -> Any:
            return plan

    checkpoint.save({"app": App()}, storage_writer=Nowhere("/nowhere"))
    clock.spend(1)


def saves_safetensors(clock: FakeClock) -> None:
    import safetensors.torch

    class Slow(dict[str, Any]):
        time_ns = 9

        def items(self) -> Any:
            clock.spend(self.time_ns)
            self.time_ns = 0
            return super().items()

    with tempfile.TemporaryDirectory() as folder:
        safetensors.torch.save_file(Slow(weight=torch.ones(2)), f"{folder}/weights")
    clock.spend(1)


def calls_collectives(clock: FakeClock) -> None:
    import torch.distributed as dist

    dist.all_gather_object([None], SlowToPickle(clock, 9))
    clock.spend(1)
    dist.broadcast_object_list([SlowToPickle(clock, 8)])
    dist.all_reduce(torch.ones(2))
    dist.barrier()
    clock.spend(2)


def waits_for_a_collective_that_runs_beside(clock: FakeClock) -> None:
    future: Any = torch.futures.Future()
    work = torch._C._distributed_c10d._create_work_from_future(future)

    def finish() -> None:
        time.sleep(0.2)  # by then the other thread waits
        clock.spend(6)
        future.set_result([torch.ones(1)])

    clock.spend(1)
    thread = threading.Thread(target=finish)
    thread.start()
    work.wait()
    thread.join()
    clock.spend(2)


def collects_garbage(clock: FakeClock) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            clock.spend(9)

    enabled = gc.isenabled()
    gc.disable()
    gc.collect()
    Cycle()
    clock.spend(1)
    gc.collect()
    if enabled:
        gc.enable()
    clock.spend(2)


def switches_to_evaluation_and_back(clock: FakeClock) -> None:
    model = SlowModel(clock, forward_ns=4)
    model(torch.ones(1, 4))
    clock.spend(1)
    model.eval()
    clock.spend(20)
    model.train()
    clock.spend(2)
    model.train(False)
    clock.spend(30)
    model.train(mode=True)
    clock.spend(3)


CHARGES: dict[str, list[tuple[Call, dict[str, int]]]] = {
    "backward": [
        (goes_backward, {"backward": 24, "gap_after_backward": 1}),
        (goes_backward_within_backward, {"backward": 12, "gap_after_backward": 1}),
        (goes_backward_and_fails, {"backward": 7, "gap_after_backward": 1}),
    ],
    "checkpoint": [(saves_state, {"checkpoint": 17, "gap_after_rest": 2})],
    "checkpoint-distributed": [(saves_sharded_state, {"checkpoint": 15, "gap_after_rest": 1})],
    "checkpoint-safetensors": [(saves_safetensors, {"checkpoint": 9, "gap_after_rest": 1})],
    "collectives": [
        (calls_collectives, {"communication": 17, "gap_after_rest": 3}),
        (waits_for_a_collective_that_runs_beside, {"communication": 6, "gap_after_rest": 3}),
    ],
    "dataloader": [
        (asks_a_loader, {"data_wait": 30, "gap_after_data_wait": 9}),
        (asks_a_loader_without_gradients, {"evaluation": 39}),
        (asks_a_loader_that_asks_another, {"data_wait": 12, "gap_after_data_wait": 6}),
    ],
    "evaluation": [],
    "forward": [
        (calls_a_model, {"forward": 10, "gap_after_forward": 3}),
        (calls_a_submodule_first, {"forward": 27, "gap_after_forward": 6}),
        (calls_a_model_without_gradients, {"evaluation": 16}),
        (calls_a_model_that_fails, {"forward": 4, "gap_after_forward": 1}),
    ],
    "gc-pauses": [(collects_garbage, {"gc": 9, "gap_after_rest": 3})],
    "grad-scaler": [(scales_gradients, {"optimizer": 10, "gap_after_optimizer": 3})],
    "optimizer": [
        (steps_an_optimizer, {"optimizer": 21, "gap_after_rest": 40, "gap_after_optimizer": 3}),
        (steps_an_optimizer_that_fails, {"optimizer": 19, "gap_after_optimizer": 1}),
    ],
    "optimizer-rest": [(clears_clips_and_schedules, {"optimizer": 21, "gap_after_optimizer": 3})],
}
CASES = [pytest.param(n, c, t, id=f"{n}: {c.__name__}") for n, cs in CHARGES.items() for c, t in cs]


@pytest.mark.parametrize("name, call, times", CASES)
def test_a_hook_charges_the_time_of_its_calls_and_no_other(clock, name, call, times):
    with measured(clock, name) as recorder:
        with one_step(recorder) as step:
            call(clock)
        assert not recorder.notes
    assert step.times == times


@pytest.mark.parametrize("name, call, times", CASES)
def test_a_hook_charges_nothing_that_another_thread_does(clock, name, call, times):
    with measured(clock, name) as recorder:
        with one_step(recorder) as step:
            thread = threading.Thread(target=call, args=[clock])
            thread.start()
            thread.join()
        assert not recorder.notes
    assert step.times == {"gap_after_rest": sum(times.values())}


@pytest.mark.parametrize("name, call, times", CASES)
def test_nothing_is_charged_once_measuring_is_off(clock, name, call, times):
    with measured(clock, name, max_steps=1) as recorder:
        with one_step(recorder):
            pass
        written = len(recorder.log)
        call(clock)
        assert len(recorder.log) == written


def test_a_model_switched_to_evaluation_and_back_was_evaluated_in_between(clock):
    with measured(clock, "evaluation", "forward") as recorder, one_step(recorder) as step:
        switches_to_evaluation_and_back(clock)
    assert step.times == {"forward": 4, "gap_after_forward": 1, "evaluation": 50, "gap_after_rest": 5}


def test_a_build_of_torch_for_the_cpu_alone_has_no_copies_to_measure(clock):
    assert torch._C._get_accelerator().type == "cpu"
    before = torch_attributes()
    with measured(clock, "copy-to-device"):
        assert torch_attributes() == before


def test_copies_between_kinds_of_device_are_charged(clock, monkeypatch):
    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.Tensor.to, torch.Tensor.copy_):
                clock.spend(9)
            return super().__torch_function__(function, types, args, kwargs or {})

    rows = torch.ones(2).as_subclass(Slow)
    elsewhere = torch.ones(2, device="meta")
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    with measured(clock, "copy-to-device") as recorder:
        with one_step(recorder) as step:
            rows.to("meta")
            rows.to(torch.device("meta"), torch.float16)
            rows.to(device="meta")
            rows.to(elsewhere)
            clock.spend(1)
            rows.to("cpu")
            rows.to(torch.float64)
            rows.to(rows)
        assert not recorder.notes
    assert step.times["copy"] == 4 * 9
    assert step.times["gap_after_copy"] == 1 + 3 * 9


def test_a_garbage_collection_leaves_the_gap_around_it_as_it_was(clock):
    with measured(clock) as recorder, one_step(recorder) as step:
        SlowModel(clock, forward_ns=4)(torch.ones(1, 4))
        collects_garbage(clock)
        clock.spend(5)
    assert step.times == {"forward": 4, "gc": 9, "gap_after_forward": 8}


def test_fetch_and_collate_on_the_training_thread_are_told_apart(clock):
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        clock.spend(8)
        return torch.stack(rows)

    with measured(clock, "dataloader") as recorder, one_step(recorder) as step:
        for _ in DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2, collate_fn=collate):
            clock.spend(3)
    assert step.times == {"data_wait": 54, "gap_after_data_wait": 9}
    assert recorder.counters["collates"] == 3
    assert recorder.counters["collate_ns"] == 24


# -- no trace


def no_names(name: str) -> dict[str, object]:
    """What a hook puts into torch, by full name."""
    before = torch_attributes()
    with measured(FakeClock(), name):
        return {key: value for key, value in torch_attributes().items() if before.get(key) is not value}


@replacing
def test_a_hook_that_leaves_puts_back_the_very_objects_it_replaced(clock, name):
    before = torch_attributes()
    with measured(clock, name):
        for call, _ in CHARGES.get(name, []):
            call(clock)
    after = torch_attributes()
    assert {key: value for key, value in after.items() if before.get(key, value) is not value} == {}


@replacing
def test_a_hook_that_leaves_keeps_what_another_library_wrapped_around_it(clock, name):
    replaced_by_us = no_names(name)
    put_there: dict[str, tuple[Any, str, Any, Any]] = {}
    with measured(clock, name):
        for path in replaced_by_us:
            owner, attribute = holder_of(path)
            ours = vars(owner)[attribute]

            def theirs(*args: Any, _ours: Any = ours, **kwargs: Any) -> Any:
                return _ours(*args, **kwargs)

            put_there[path] = owner, attribute, ours, theirs
            setattr(owner, attribute, theirs)
    try:
        for owner, attribute, _, theirs in put_there.values():
            assert vars(owner)[attribute] is theirs
        for call, _ in CHARGES.get(name, []):
            call(clock)  # theirs calls ours, which calls torch's
    finally:
        for owner, attribute, ours, _ in put_there.values():
            setattr(owner, attribute, original_of(ours))


def holder_of(path: str) -> tuple[Any, str]:
    name, _, attribute = path.rpartition(".")
    if name in sys.modules:
        return sys.modules[name], attribute
    module, _, cls = name.rpartition(".")
    return getattr(sys.modules[module], cls), attribute


def original_of(wrapper: Any) -> Any:
    """What a wrapper of ours calls, from its closure."""
    for variable, cell in zip(wrapper.__code__.co_freevars, wrapper.__closure__, strict=True):
        if variable in ("original", "worker_loop"):
            return cell.cell_contents
    raise AssertionError(f"{wrapper} has no original")


def test_an_inherited_method_is_inherited_again_afterwards():
    class Base:
        def method(self) -> int:
            return 1

    class Child(Base):
        pass

    with replaced(Child, "method", lambda original: lambda self: original(self) + 1):
        assert (Child().method(), Base().method()) == (2, 1)
    assert "method" not in vars(Child)


def test_a_wrapped_function_keeps_its_name_docstring_and_signature(clock):
    import inspect

    plain = inspect.signature(torch.save), torch.save.__doc__, torch.save.__name__, torch.save.__module__
    with measured(clock):
        assert plain == (
            inspect.signature(torch.save),
            torch.save.__doc__,
            torch.save.__name__,
            torch.save.__module__,
        )


def test_the_iterator_of_a_loader_keeps_its_type_length_and_attributes(clock):
    loader = DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2)
    plain = iter(loader)
    with measured(clock):
        batches = iter(loader)
        assert type(batches) is type(plain)
        assert len(batches) == len(plain) == len(loader) == 3
        assert vars(batches).keys() == vars(plain).keys()
        assert [row.tolist() for row in batches] == [row.tolist() for row in plain]


def test_models_and_their_classes_pickle_and_copy_under_the_hooks(clock, tmp_path):
    import copy
    import pickle

    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    with measured(clock):
        model(torch.ones(1, 4))
        copied = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        torch.save(model, tmp_path / "model")
    loaded = torch.load(tmp_path / "model", weights_only=False)
    for other in (copied, again, loaded):
        assert vars(other).keys() == vars(model).keys()
        assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))


# -- exceptions pass through as they are


def fails_in_the_dataset() -> None:
    class Broken(Dataset[Any]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            raise OSError("no such image")

    next(iter(DataLoader(Broken())))


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


@pytest.mark.parametrize("reading", range(1, 9))
def test_an_interrupt_that_lands_in_our_own_code_is_still_an_interrupt(clock, reading):
    """Ctrl-C comes between any two instructions; the calls of the clock stand for all of them."""

    class Interrupted(FakeClock):
        left = 10**9

        def __call__(self) -> int:
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return super().__call__()

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


TELLS = sorted(
    name
    for name, value in vars(Recorder).items()
    if callable(value)
    and not name.startswith("_")
    and name not in ("broke", "guarded", "reset", "push", "leave", "finish")
    and name not in ("take_rows", "take_device_rows", "has_rows")
    and name
    not in ("on_training_thread", "switch_off", "resume", "claim_thread", "step_marked", "unmeasured")
)
"""What hooks tell the recorder."""


@pytest.mark.parametrize("method", TELLS)
def test_a_failure_of_our_own_is_noted_and_the_script_goes_on(clock, monkeypatch, method):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise LookupError(f"{method} is broken")

    monkeypatch.setattr(Recorder, method, fail)
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
        notes = list(recorder.notes)
    assert all(not torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert notes, "it was called, and the report says that it failed"
    assert all("measuring failed in " in note and f"{method} is broken" in note for note in notes)
    assert len(notes) == len(set(notes))


@pytest.mark.parametrize("method", ["site", "batch_asked", "optimizer_stepped", "evaluation_begins"])
def test_what_a_signal_handler_of_the_scripts_raises_in_our_code_reaches_the_script(
    clock, monkeypatch, method
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
            monkeypatch.setattr(Recorder, method, in_our_code)
            with pytest.raises(Late):
                for rows in DataLoader(SlowData(clock, num_rows=4, fetch_ns=1)):
                    model(rows).sum().backward()
                    optimizer.step()
                    with torch.no_grad():
                        model(rows)
            assert not recorder.notes
    finally:
        signal.signal(signal.SIGALRM, before)


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


# -- names that a torch may lack


MISSING = {
    "backward": ("torch.autograd", "grad"),
    "checkpoint": ("torch", "save"),
    "dataloader": ("torch.utils.data.dataloader._BaseDataLoaderIter", "__next__"),
    "workers": ("torch.utils.data._utils.worker", "_worker_loop"),
    "evaluation": ("torch.nn.Module", "train"),
    "grad-scaler": ("torch.amp.grad_scaler.GradScaler", "unscale_"),
    "optimizer": ("torch.optim.optimizer", "register_optimizer_step_post_hook"),
    "optimizer-rest": ("torch.optim.Optimizer", "zero_grad"),
    "loader-facts": ("torch.utils.data.dataloader.DataLoader", "__iter__"),
    "queue-depth": ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_hook_whose_name_torch_lacks_is_off_and_the_report_says_which(monkeypatch, tmp_path, name):
    import diagnose

    owner, attribute = MISSING[name]
    target = sys.modules.get(owner) or holder_of(f"{owner}.")[0]
    before = torch_attributes()
    with monkeypatch.context() as patch:
        parameter = nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        patch.delattr(target, attribute)
        diagnose.attach(tmp_path / "run")
        for _ in range(3):
            parameter.grad = torch.ones(1)
            optimizer.step()
            diagnose.step()
        profile = diagnose.detach()
    assert torch_attributes() == before
    (note,) = [note for note in profile.notes if note.startswith(f"{name} is")]
    assert note == f"{name} is not measured: this torch has no {attribute}"


def test_every_replacing_hook_is_tried_without_one_of_its_names():
    replacing = {name for name in HOOKS if no_names(name)} | {"optimizer"}
    by_public_names = {
        "checkpoint-distributed",
        "checkpoint-safetensors",
        "collectives",
        "copy-to-device",
        "ddp-waits",
        "forward",
        "fsdp-waits",
        "optimizer-facts",
        "process-group",
    }
    assert replacing - by_public_names <= set(MISSING)


# -- hooks of torch's own


def test_no_model_gets_a_hook_of_torch(clock):
    model = nn.Sequential(nn.Linear(4, 2))
    with measured(clock):
        model(torch.ones(1, 4)).sum().backward()
        for module in model.modules():
            tables = [v for k, v in vars(module).items() if "hook" in k and isinstance(v, dict)]
            assert not any(tables)


def test_a_submodule_is_called_by_torchs_own_call(clock):
    calls: list[str] = []

    class Part(nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe(1)
            while frame.f_code.co_name in ("_call_impl", "_wrapped_call_impl"):
                assert frame.f_back is not None
                frame = frame.f_back
            calls.append(Path(frame.f_code.co_filename).name)
            return rows

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.part(rows)

    model = Whole()
    with measured(clock):
        for _ in range(3):
            model(torch.ones(1))
    assert calls == ["test_hooks.py"] * 3, "no wrapper of ours stands between a model and its parts"


def test_a_model_that_appears_late_is_found_and_the_search_rests_meanwhile(clock):
    """Each look replaces a method of the class that all modules come from, which costs a millisecond."""

    class Late(SlowModel):
        pass

    early, late = SlowModel(clock, forward_ns=3), Late(clock, forward_ns=5)
    own_call, looked = nn.Module.__call__, []
    with measured(clock, "forward") as recorder:
        recorder.step_marked()
        for step in range(40):
            early(torch.ones(1, 4))
            looked.append(nn.Module.__call__ is not own_call)
            if step >= 20:
                late(torch.ones(1, 4))
            recorder.step_marked()
        times = [each.times.get("forward", 0) for each in steps_of(recorder)]
    assert nn.Module.__call__ is own_call
    assert all(looked[:8]) and not any(looked[9:16] + looked[17:32] + looked[33:]) and looked[16]
    assert times[:20] == [3] * 20
    assert times[33:] == [8] * 7
