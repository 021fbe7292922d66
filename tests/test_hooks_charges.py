"""Each hook charges the time of its calls to its slot, and no other time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from tests.conftest import torch_attributes
from tests.fakes import SlowData, SlowModel, measured, one_step
from tests.hook_calls import CHARGES, collects_garbage, switches_to_evaluation_and_back

pytest_plugins = ("tests.group_of_one", "tests.training_loops")
pytestmark = pytest.mark.usefixtures("group_of_one")


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


@pytest.mark.parametrize(("trained", "phase"), [(True, "forward"), (False, "evaluation")])
def test_a_model_called_in_a_reentrant_checkpoint_is_trained_where_a_gradient_goes_through(
    clock, trained: bool, phase: str
):
    model, x = SlowModel(clock, forward_ns=4), torch.ones(2, 4, requires_grad=True)
    with (
        measured(clock, "forward") as recorder,
        one_step(recorder) as step,
        torch.set_grad_enabled(trained),
    ):
        checkpoint(lambda inputs: model(inputs), x, use_reentrant=True)
    assert step.times == {phase: 4}


def test_a_build_of_torch_for_the_cpu_alone_has_no_copies_to_measure(clock):
    assert torch.accelerator.current_accelerator() is None
    before = torch_attributes()
    with measured(clock, "copy-to-device"):
        assert torch_attributes() == before


@pytest.mark.parametrize("built", [False, True])
def test_under_torch_2_6_the_driver_is_not_asked_for_a_device_to_copy_to(clock, monkeypatch, built: bool):
    def started() -> torch.device:
        raise RuntimeError("Cannot access accelerator device when none is available.")

    monkeypatch.setattr(torch, "__version__", TorchVersion("2.6.0+cu124"))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", started)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    original = torch.Tensor.to
    with measured(clock, "copy-to-device"):
        assert (torch.Tensor.to is not original) == built


def test_copies_between_kinds_of_device_are_charged(clock, monkeypatch):
    class Slow(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (torch.Tensor.to, torch.Tensor.copy_):
                clock.spend(9)
            return super().__torch_function__(function, types, args, kwargs or {})

    rows = torch.ones(2).as_subclass(Slow)
    elsewhere = torch.ones(2, device="meta")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
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


def test_a_method_in_place_of_torchs_is_known_as_that_to_libraries(clock, monkeypatch):
    """They keep torch's own in lists and sets, as lazy modules and torchvision do."""
    original = torch.Tensor.to
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    with measured(clock, "copy-to-device") as recorder:
        assert torch.Tensor.to is not original
        assert (
            torch.Tensor.to in [original]
            and torch.Tensor.to in {original}
            and original in {torch.Tensor.to}
        )
        assert torch.Tensor.to != torch.Tensor.cuda
        assert torch.Tensor.to.__name__ == "to"
        layer = torch.nn.LazyLinear(3).to("cpu").to(torch.float64)
        assert layer(torch.ones(1, 2, dtype=torch.float64)).shape == (1, 3)
        assert not recorder.notes
    assert torch.Tensor.to is original


def test_a_garbage_collection_leaves_the_gap_around_it_as_it_was(clock):
    with measured(clock) as recorder, one_step(recorder) as step:
        SlowModel(clock, forward_ns=4)(torch.ones(1, 4))
        collects_garbage(clock)
        clock.spend(5)
    assert step.times == {"forward": 4, "gc": 9, "gap_after_forward": 8}


class Elsewhere(torch.autograd.Function):
    """Its backward pass waits for another thread, as the training thread does for that of a GPU."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, call: Callable[[], object]) -> torch.Tensor:
        ctx.call = call
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        in_a_thread(ctx.call)
        return gradient, None


def in_a_thread(call: Callable[[], object]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def goes_backward_elsewhere(call: Callable[[], object]) -> None:
    Elsewhere.apply(torch.ones(1, requires_grad=True), call).backward()


def in_a_node(call: Callable[[], object]) -> None:
    """Calls it in a backward pass of the calling thread's own."""
    result = torch.ones(1, requires_grad=True) * 2
    result.register_hook(lambda gradient: call())
    result.backward()


@pytest.mark.parametrize(
    ("where", "times"),
    [
        (lambda call: goes_backward_elsewhere(lambda: in_a_node(call)), {"backward": 3, "gc": 9}),
        (goes_backward_elsewhere, {"backward": 12}),  # in a thread that is none of autograd's
        (lambda call: in_a_thread(lambda: in_a_node(call)), {"gap_after_rest": 12}),  # not the loop's pass
    ],
)
def test_a_collection_is_charged_in_a_thread_of_autograds_that_the_loop_waits_for(clock, where, times):
    with measured(clock, "backward", "gc-pauses") as recorder:
        with one_step(recorder) as step:
            where(lambda: collects_garbage(clock))
        assert not recorder.notes
    assert step.times == times


def test_a_backward_pass_compiled_in_a_thread_that_it_waits_for_is_charged_to_compile(clock):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: Any, inputs: Any) -> Any:
        clock.spend(7)
        return make_boxed_func(graph.forward)

    model = torch.nn.Linear(1, 1)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler))
    with measured(clock, "backward", "compile") as recorder, one_step(recorder) as step:
        loss = compiled(torch.ones(1, 1)).sum()
        clock.spend(1)
        goes_backward_elsewhere(loss.backward)
        assert not recorder.notes
    torch._dynamo.reset()
    assert model.weight.grad is not None
    assert step.times == {"compile": 14, "gap_after_rest": 1}


@pytest.mark.extended
def test_what_a_wait_for_a_batch_leaves_to_the_collector_is_counted_apart(clock):
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        collects_garbage(clock)
        return torch.stack(rows)

    with measured(clock, "dataloader", "gc-pauses") as recorder, one_step(recorder) as step:
        collects_garbage(clock)
        for _ in DataLoader(SlowData(clock, num_rows=4, fetch_ns=5), batch_size=2, collate_fn=collate):
            pass
    assert step.times["gc"] == 3 * 9
    assert recorder.feed.counters["collected_ns"] == 3 * 9
    assert recorder.feed.counters["collected_waiting_ns"] == 2 * 9


def test_fetch_and_collate_on_the_training_thread_are_told_apart(clock):
    def collate(rows: list[torch.Tensor]) -> torch.Tensor:
        clock.spend(8)
        return torch.stack(rows)

    with measured(clock, "dataloader") as recorder, one_step(recorder) as step:
        for _ in DataLoader(SlowData(clock, num_rows=6, fetch_ns=5), batch_size=2, collate_fn=collate):
            clock.spend(3)
    assert step.times == {"data_wait": 54, "gap_after_data_wait": 9}
    assert recorder.feed.counters["collates"] == 3
    assert recorder.feed.counters["collate_ns"] == 24


def test_a_call_on_what_another_model_has_computed_is_a_further_one(clock):
    with measured(clock, "forward") as recorder, one_step(recorder):
        model, criterion = torch.nn.Linear(4, 1), torch.nn.MSELoss()
        criterion(model(torch.ones(1, 4)), target=torch.ones(1, 1))
    calls = {kind: calls for (kind, *_), calls in recorder.met.sites.items()}
    assert calls == {"forward": 1, "further": 1}


def test_the_line_that_steps_a_schedule_is_remembered_but_not_what_makes_one(clock):
    with measured(clock, "optimizer_rest") as recorder, one_step(recorder):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        first = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        warmup = torch.optim.lr_scheduler.ChainedScheduler([first])
        made = dict(sites := recorder.met.sites)
        warmup.step()
    calls = {key: calls - made.get(key, 0) for key, calls in sites.items() if key[0] == "schedule"}
    assert [each for each in calls.values() if each] == [1]
