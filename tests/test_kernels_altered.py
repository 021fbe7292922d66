"""What scripts do to a swapped optimizer between two steps: they exchange states, or regroup parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnose.kernels._swap import swap, unswap
from torch.optim import Optimizer

from tests.kernels_on_cpu import (
    MAKERS,
    STATEFUL,
    CpuDevice,
    assert_close,
    everything,
    network,
    network_and,
    step,
)

pytest_plugins = ("tests.kernels_on_cpu",)


# -- state


def zeros_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: torch.zeros_like(value) for key, value in state.items()}


def clear(optimizer: Optimizer, param: torch.Tensor) -> None:
    optimizer.state.clear()


def delete(optimizer: Optimizer, param: torch.Tensor) -> None:
    del optimizer.state[param]


def empty(optimizer: Optimizer, param: torch.Tensor) -> None:
    optimizer.state[param].clear()


def replace(optimizer: Optimizer, param: torch.Tensor) -> None:
    optimizer.state[param] = zeros_like(optimizer.state[param])


def exchange_within(optimizer: Optimizer, param: torch.Tensor) -> None:
    optimizer.state[param].update(zeros_like(optimizer.state[param]))


def zero_with_a_new_count(optimizer: Optimizer, param: torch.Tensor) -> None:
    state = optimizer.state[param]
    for value in state.values():
        if value.dim():
            value.zero_()
    if "step" in state:
        state["step"] = torch.tensor(0.0)


RESETS = (clear, delete, empty, replace, exchange_within, zero_with_a_new_count)


@pytest.mark.parametrize("goes", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("reset", RESETS)
def test_what_is_reset_in_the_state_begins_anew_as_with_torch(
    reset: Callable[[Optimizer, torch.Tensor], None], name: str, goes: bool, device: CpuDevice
) -> None:
    """Whether kernels or torch go on from there."""
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        taken = swap(optimizer) if on else None
        for number in range(3):
            step(model, optimizer, number)
        reset(optimizer, model[2].weight)
        saved = everything(model, optimizer)
        if goes:
            unswap(optimizer)
        for number in range(3, 6):
            step(model, optimizer, number)
        assert taken is None or taken.stepper.left == []
        ends.append([*saved, *everything(model, optimizer)])
    assert_close(ends[1], ends[0])
    assert device.launched == ["sgd" if name.startswith("sgd") else "adamw"] * (3 if goes else 6)


@pytest.mark.parametrize("momenta", [(0, 0, 0.9, 0.9), (0.9, 0.9, 0, 0, 0.5, 0.5)])
def test_momentum_that_a_schedule_begins_or_ends_is_that_of_torch(
    momenta: tuple[float, ...], device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and("sgd-dampening")
        taken = swap(optimizer) if on else None
        for number, momentum in enumerate(momenta):
            optimizer.param_groups[0]["momentum"] = momentum
            step(model, optimizer, number)
            assert taken is None or not taken.stepper.left
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


def test_a_count_of_steps_that_torch_refuses_it_refuses_with_kernels_too(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)
    step(model, optimizer, 0)
    optimizer.state[model[0].weight]["step"] = 1
    with pytest.raises(RuntimeError, match="list of singleton tensors"):
        step(model, optimizer, 1)


def test_what_the_script_keeps_in_the_state_beside_makes_nothing_anew(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    optimizer.state["before"] = {}
    taken = swap(optimizer)
    step(model, optimizer, 0)
    [lineup] = taken.stepper._lineups
    for number in range(1, 4):
        optimizer.state["before"] = {"loss": 1.0 / number}
        optimizer.state["behind"] = {"loss": 1.0 / number}
        step(model, optimizer, number)
    assert taken.stepper._lineups == [lineup]


# -- groups


def grouped(name: str, model: torch.nn.Module) -> Optimizer:
    """The last group has settings of its own."""
    params = list(model.parameters())
    return MAKERS[name]([{"params": params[:2]}, {"params": params[2:], "lr": 0.1, "weight_decay": 0.0}])


def merge(optimizer: Optimizer) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    optimizer.param_groups.clear()
    optimizer.add_param_group({"params": params})


def drop_the_first(optimizer: Optimizer) -> None:
    del optimizer.param_groups[0]


def drop_the_last(optimizer: Optimizer) -> None:
    del optimizer.param_groups[1]


def move_the_border(optimizer: Optimizer) -> None:
    first, last = optimizer.param_groups
    last["params"].insert(0, first["params"].pop())


@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
@pytest.mark.parametrize("regroup", [merge, drop_the_first, drop_the_last, move_the_border])
def test_parameters_that_are_regrouped_are_stepped_as_by_torch(
    regroup: Callable[[Optimizer], None], name: str, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model = network()
        optimizer = grouped(name, model)
        taken = swap(optimizer) if on else None
        for number in range(6):
            if number == 3:
                regroup(optimizer)
            step(model, optimizer, number)
        assert taken is None or taken.stepper.left == []
        unswap(optimizer)
        states: list[dict[str, Any]] = [optimizer.state[param] for param in model.parameters()]
        held = [value for state in states for value in state.values()]
        ends.append([tensor.detach().clone() for tensor in [*model.parameters(), *held]])
    assert_close(ends[1], ends[0])
    assert len(device.launched) == 6


@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_what_is_regrouped_is_saved_and_given_back_to_torch_without_a_step(
    name: str, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model = network()
        optimizer = grouped(name, model)
        if on:
            swap(optimizer)
        for number in range(3):
            step(model, optimizer, number)
        merge(optimizer)
        saved = everything(model, optimizer)
        unswap(optimizer)
        step(model, optimizer, 3)
        ends.append([*saved, *everything(model, optimizer)])
    assert_close(ends[1], ends[0])
    assert len(device.launched) == 3
