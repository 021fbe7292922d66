"""Whose a collective is: the loop's, or the model's and the optimizer's own."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diagnose.core.ledger import SLOT_OF
from tests.fakes import measured

NUMBER = torch.ones(1)
INTO_ONE = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
CALLS = "def log(number):\n    import torch.distributed as dist\n    dist.all_reduce(number)\n"


@pytest.fixture(scope="module", autouse=True)
def part_of_group() -> Iterator[Any]:
    """A group of one, and in it another one, which is not all of it as far as the calls tell."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.new_group([0])
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("phase", "package", "is_own"),
    [
        ("forward", "train", True),
        ("optimizer", "torch.distributed.optim.zero_redundancy_optimizer", True),
        ("forward", "lightning.fabric.utilities.distributed", False),
        (None, "train", False),
    ],
)
def test_what_is_called_inside_of_model_and_optimizer_is_their_own(
    phase: str | None, package: str, is_own: bool
) -> None:
    names: dict[str, Any] = {"__name__": package}
    exec(CALLS, names)
    with measured(perf_counter_ns, "collectives") as recorder:
        recorder.step_marked()
        interrupted = recorder.push(SLOT_OF[phase]) if phase else None
        names["log"](NUMBER)
        if phase and interrupted is not None:
            recorder.leave(SLOT_OF[phase], interrupted)
        assert ("exchanges" in recorder.facts) is is_own
        assert not recorder.notes


def test_what_a_loop_adds_up_between_backward_and_the_optimizer_is_told_with_its_size():
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            for _ in range(2):
                model(torch.ones(2, 8)).sum().backward()
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                dist.all_reduce(NUMBER.clone())
                dist.all_reduce(torch.ones(5, dtype=torch.long))
            work = dist.all_reduce(torch.ones(100), async_op=True)
            before_ns = averaged(recorder)["waited_ns"]
            work.wait()
            assert averaged(recorder)["waited_ns"] > before_ns
            optimizer.step()
            dist.all_reduce(torch.ones(1000))  # of the log
        assert {**averaged(recorder), "waited_ns": 0} == {
            "elements": 2 * (2 * 36 + 100),
            "passes": 4,
            "rounds": 2,
            "trained": 36,
            "trained_tensors": 2,
            "waited_ns": 0,
        }
        assert "exchanges" not in recorder.facts
        assert not recorder.notes


def in_turn(gradient: torch.Tensor, how: str) -> None:
    """Averages a gradient over all ranks by other means than one sum."""
    if how == "all_gather":
        dist.all_gather([torch.empty_like(gradient)], gradient)
    elif how == INTO_ONE:
        getattr(dist, how)(torch.empty_like(gradient), gradient)
    elif how == "gather":
        dist.gather(gradient, [torch.empty_like(gradient)])
        dist.broadcast(gradient, 0)
    else:
        dist.reduce(gradient, 0)
        dist.broadcast(gradient, 0)


@pytest.mark.parametrize("how", ["all_gather", INTO_ONE, "gather", "reduce"])
def test_what_a_loop_gathers_of_gradients_or_hands_on_is_their_average_once(how: str):
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            for parameter in model.parameters():
                in_turn(parameter.grad, how)
            optimizer.step()
            dist.all_gather([torch.empty(36)], torch.ones(36))  # of the log
        found = averaged(recorder)
        assert found["elements"] == found["passes"] * 36 == 72
        assert not recorder.notes


def test_what_is_handed_on_after_the_optimizers_step_is_told_apart():
    model = torch.nn.Linear(8, 4)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)  # before any pass all begin alike
    optimizer = torch.optim.SGD([model.weight], lr=0.01)
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            for parameter in model.parameters():
                dist.broadcast(parameter.data, 0)
            dist.broadcast(NUMBER, 0)
        found = told(recorder, "handed_on")
        assert found["elements"] == 2 * found["trained"] == 72
        assert found["waited_ns"] > 0
        assert not averaged(recorder)


def test_a_line_of_few_numbers_is_of_gradients_only_if_it_was_seen_to_be():
    model = torch.nn.Linear(9999, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ten = torch.nn.Linear(5, 2, bias=False)
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            (model(torch.ones(2, 9999)).sum() + ten(torch.ones(2, 5)).sum()).backward()
            dist.all_reduce(model.weight.grad)
            before = averaged(recorder)
            for _ in range(2):
                dist.all_reduce(torch.ones(5))  # norms of its layers
            assert averaged(recorder) == before
            dist.all_reduce(torch.ones(100))  # a module's, in one tensor
            dist.all_reduce(ten.weight.grad)
            assert averaged(recorder)["waited_ns"] > before["waited_ns"]
            optimizer.step()
        assert averaged(recorder)["elements"] == 2 * (9999 + 100 + 10)
        assert not recorder.notes


class AveragedSGD(torch.optim.SGD):
    """An optimizer that averages the gradients before it uses them."""

    def step(self, closure: Any = None) -> None:
        average(self)
        super().step(closure)


def average(optimizer: torch.optim.Optimizer, *hooked: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        dist.all_reduce(parameter.grad)


@pytest.mark.parametrize("where", ["of a gradient", "when it is there", "in step", "before step"])
@pytest.mark.parametrize("waits", [False, True])
def test_gradients_are_added_up_in_a_pass_and_in_a_step_too_and_wherever_that_is_waited_for(
    where: str, waits: bool
):
    model = torch.nn.Linear(8, 4)
    works: list[Any] = []

    def add_up(gradient: torch.Tensor) -> None:
        works.append(dist.all_reduce(gradient, async_op=waits))

    for parameter in model.parameters():
        if where == "of a gradient":
            parameter.register_hook(add_up)
        elif where == "when it is there":
            parameter.register_post_accumulate_grad_hook(lambda parameter: add_up(parameter.grad))
    kind = AveragedSGD if where == "in step" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01)
    if where == "before step":
        optimizer.register_step_pre_hook(average)
    with measured(perf_counter_ns) as recorder:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
            before_ns = told(recorder, "exchanges").get("waited_ns", 0)
            for work in filter(None, works):
                work.wait()
                assert told(recorder, "exchanges")["waited_ns"] > before_ns
            works.clear()
            optimizer.step()
        found = told(recorder, "averaging_inside")
        assert 0 < found["waited_ns"] <= told(recorder, "exchanges")["waited_ns"]
        assert {**found, "waited_ns": 0} == {
            "elements": 108,
            "passes": 3,
            "rounds": 3,
            "trained": 36,
            "trained_tensors": 2,
            "waited_ns": 0,
        }
        assert "averaging" not in recorder.facts
        assert not recorder.notes


class SummedBackwards(torch.autograd.Function):
    """What tensor parallelism does to the gradients of activations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(gradient)
        return gradient


def test_gradients_of_activations_and_what_a_package_adds_up_are_none_of_the_parameters():
    names: dict[str, Any] = {"__name__": "package"}
    exec(compile(CALLS, "/site-packages/package/hooks.py", "exec"), names)
    model = torch.nn.Linear(8, 4)
    model.bias.register_hook(names["log"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            x = SummedBackwards.apply(model(torch.ones(2, 8)))
            x.register_hook(lambda gradient: dist.all_reduce(gradient))
            x.sum().backward()
            optimizer.step()
        assert told(recorder, "exchanges")["waited_ns"] > 0
        assert not recorder.facts.keys() & {"averaging", "averaging_inside"}
        assert not recorder.notes


class Counting(torch.nn.Linear):
    """Adds up over some ranks what its codes were used for."""

    group: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes = super().forward(x)
        dist.all_reduce(codes.detach().sum(0), group=self.group)
        return codes


@pytest.mark.parametrize("of", ["all", "all by name", "some"])
def test_what_a_model_waits_for_all_ranks_is_told_from_what_it_waits_for_some(part_of_group: Any, of: str):
    model = Counting(8, 4)
    if of == "some":
        model.group = part_of_group
    elif of == "all by name":
        model.group = dist.group.WORLD
    with measured(perf_counter_ns) as recorder:
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
        found = told(recorder, "exchanges")
        assert (0 < found["among_all_ns"] == found["waited_ns"]) is (of != "some")
        assert not recorder.notes


def averaged(recorder: Any) -> dict[str, int]:
    """What the hook tells of sums when the records are written next."""
    return told(recorder, "averaging")


def told(recorder: Any, name: str) -> dict[str, int]:
    """What the hook tells when the records are written next; nothing where there is nothing to tell."""
    for tell in recorder.looks.flushed:
        tell()
    found: dict[str, int] = recorder.facts.get(name, {})
    return found
