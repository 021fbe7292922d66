"""What kernels cannot do, or can do no longer: it is refused in words, or goes on by torch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diagnose.kernels import _lineup
from diagnose.kernels._algorithms import Algorithm
from diagnose.kernels._swap import CannotSwap, support, swap
from torch import nn

from tests.kernels_on_cpu import (
    MAKERS,
    STATEFUL,
    CpuDevice,
    Make,
    assert_close,
    everything,
    failing,
    network,
    network_and,
    step,
    without,
)

pytest_plugins = ("tests.kernels_on_cpu",)


class MyAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: MyAdamW(p), "not for MyAdamW of"),
        (lambda p: torch.optim.RMSprop(p), "there are kernels for Adam, AdamW"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "it is differentiable"),
        (
            lambda p: torch.optim.Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True),
            "a coefficient other than the learning rate is a tensor",
        ),
        (
            lambda p: torch.optim.SGD([nn.Parameter(q.detach().double()) for q in p], lr=0.1),
            "a parameter is of torch.float64",
        ),
        (lambda p: torch.optim.SGD([torch.zeros(4, 6)[:, ::2]], lr=0.1), "a parameter has gaps in memory"),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(2).cfloat())], lr=0.1), "complex64"),
    ],
)
def test_what_no_kernel_can_do_is_refused_in_words(make: Make, reason: str, device: CpuDevice) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2, 2))])
    assert any(reason in each for each in support(optimizer)), support(optimizer)
    with pytest.raises(CannotSwap, match=reason):
        swap(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_parameters_that_share_memory_are_refused(device: CpuDevice) -> None:
    flat = torch.zeros(10)
    optimizer = torch.optim.SGD([flat[:6], flat[5:]], lr=0.1)
    assert support(optimizer) == ["two parameters share memory"]


def test_a_second_swap_is_refused(device: CpuDevice) -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    swap(optimizer)
    with pytest.raises(CannotSwap, match="by kernels already"):
        swap(optimizer)


def test_on_a_cpu_it_says_why_not() -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    [reason] = support(optimizer)
    assert reason == "the parameters are on cpu, and the kernels are for CUDA; torch's own serve there"
    with pytest.raises(CannotSwap, match=r"AdamW: the parameters are on cpu.* goes on with torch's AdamW"):
        swap(optimizer)


def test_an_unknown_allowance_is_a_mistake_of_the_caller(device: CpuDevice) -> None:
    with pytest.raises(ValueError, match="unknown in allow: magic; known: stochastic-rounding"):
        swap(MAKERS["sgd"](network().parameters()), allow=("magic",))


def test_a_parameter_given_twice_is_refused(device: CpuDevice) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([weight, weight], lr=0.1)
    assert support(optimizer) == ["two parameters share memory"]


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_kernel_that_does_not_compile_hands_the_step_to_torch_and_says_so_once(
    clip: Any, name: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step, where deferred clipping has left the gradients as they were."""
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        if on:
            taken = swap(optimizer, clip=clip)
            without("sgd" if name.startswith("sgd") else "adamw", device, monkeypatch)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 50), number + 1.0)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            expected = r"no image for sm_61.\nTraining goes on with torch's (AdamW|Adam|SGD)\."
            with pytest.warns(RuntimeWarning, match=expected) if on and number == 0 else nullcontext():
                optimizer.step()
            if on:
                assert "sm_61" in taken.stepper.left[0]
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert not {"adamw", "sgd"} & set(device.launched)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("clip", ["exact", "deferred"])
@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_a_launch_that_fails_hands_its_step_to_torch_and_says_so_once(
    name: str, clip: Any, after: int, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        if on:
            swap(optimizer, clip=clip)
            failing(name.partition("-")[0], device, monkeypatch, after=after)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 50), number + 1.0)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            fails = on and number == after
            with pytest.warns(RuntimeWarning, match="code 701") if fails else nullcontext():
                optimizer.step()
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("short", ["tables", "states"])
@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_where_memory_is_too_short_for_kernels_torch_goes_on_in_a_whole_state(
    name: str, short: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    def one_left(*_: Any) -> torch.Tensor:
        return room.pop() if room else none_left()

    room = [torch.zeros(60, 50)]
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        if on:
            swap(optimizer)
            if short == "tables":
                monkeypatch.setattr(_lineup, "Table", none_left)
            else:
                monkeypatch.setattr(Algorithm, "make", one_left)
        with pytest.warns(RuntimeWarning, match="out of memory") if on else nullcontext():
            step(model, optimizer, 0)
        step(model, optimizer, 1)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert device.launched == []


def test_a_variant_that_does_not_compile_later_costs_no_step_and_no_state(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter in 16 bits joins, for which another variant is needed."""
    ends = []
    for on in (False, True):
        model, optimizer = network_and("adamw")
        if on:
            swap(optimizer)
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        if on:
            without("adamw", device, monkeypatch)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
        optimizer.param_groups[1]["params"][0].grad = torch.ones(5)
        with pytest.warns(RuntimeWarning, match="no image") if on else nullcontext():
            step_without_zeroing(model, optimizer)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert {float(each["step"]) for each in optimizer.state_dict()["state"].values()} == {1.0, 3.0}


def step_without_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 50)).square().mean().backward()
    optimizer.step()
