"""Launches with 32 KB of arguments, as drivers since CUDA 12.1 get them for models of 500 parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diagnose.kernels._structs import TOLD_MANY_WORDS
from diagnose.kernels._swap import swap, unswap
from diagnose.kernels._table import Table
from torch.nn.utils import clip_grad_norm_

from tests.kernels_on_cpu import CpuDevice, kernels_on_cpu
from tests.test_kernels_table import adamw, assert_same_as_torch
from tests.test_kernels_table_written import copies, like, many

GROUP_WORDS = 8


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu(seed=3, large_arguments=True) as device:
        yield device


def is_compiled_for_many(device: CpuDevice) -> list[tuple[str, bool]]:
    """Of each launch, whether its code takes large arguments."""
    return [(entry, defines.get("TOLD") == TOLD_MANY_WORDS) for entry, defines in device.variants]


@pytest.mark.extended
def test_one_launch_tells_where_hundreds_of_gradients_are(device: CpuDevice) -> None:
    held = []

    def grads(number: int, params: list[torch.Tensor]) -> list[torch.Tensor | None]:
        held.append(like(number, params))  # so that no address comes back
        return held[-1]

    def each(number: int, optimizer: torch.optim.Optimizer, params: list[torch.Tensor]) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5

    assert assert_same_as_torch(many, grads=grads, each=each).stepper.left == []
    count = len(many())
    assert is_compiled_for_many(device) == [("adamw", True)] * 4
    assert device.told == [count, *[count + GROUP_WORDS] * 3]


def test_what_the_table_holds_already_goes_without_large_arguments(device: CpuDevice) -> None:
    params = many()
    optimizer = adamw(params)
    swap(optimizer)
    for p, grad in zip(params, like(0, params), strict=True):
        p.grad = grad
    for _ in range(2):
        optimizer.step()
    params[0].grad = params[0].grad.clone()  # type: ignore[union-attr]
    optimizer.step()
    assert device.told == [len(params), 0, len(params)]
    assert [is_many for _, is_many in is_compiled_for_many(device)] == [True, False, True]


def clipped(params: list[torch.Tensor], grads: list[torch.Tensor | None]) -> torch.Tensor:
    """Gives the gradients to the parameters and clips them. They have one value: so their norm does not
    depend on the order in which torch adds."""
    for p, grad in zip(params, grads, strict=True):
        assert grad is not None
        p.grad = grad.clone()
    return clip_grad_norm_(params, 1.0)


def test_hundreds_of_gradients_are_clipped_and_stepped_as_by_torch(device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        params = many()
        optimizer = adamw(params)
        if on:
            swap(optimizer)
        norms = []
        for number in range(3):
            norms.append(clipped(params, like(number, params)))
            optimizer.step()
        ends.append([*params, *[p.grad for p in params], *norms])
        unswap(optimizer)
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)
    assert is_compiled_for_many(device)[-3:] == [("gradient_norm", True), ("scale", False), ("adamw", True)]


def test_a_captured_step_with_clipping_replays_with_its_own_gradients(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is its launches with the arguments they had; between replays steps are made without it."""
    params = many()
    optimizer = adamw(params)
    swap(optimizer)
    kept: dict[str, list[torch.Tensor | None]] = {}

    def step(when: str, number: int) -> torch.Tensor:
        """Writes what a backward pass gives into the gradients of the graph, or of the steps beside it."""
        grads = kept.setdefault(when, like(number, params))
        for p, grad, value in zip(params, grads, like(number, params), strict=True):
            assert grad is not None and value is not None
            p.grad = grad.copy_(value)
        norm = clip_grad_norm_(params, 1.0)
        optimizer.step()
        return norm

    step("captured", 0)
    launch, graph = device.launch, []
    with monkeypatch.context() as capturing:
        capturing.setattr(Table, "is_captured", lambda self: True)
        capturing.setattr(
            device, "launch", lambda *names, args, **how: graph.append((names, copies(args), how))
        )
        norm = step("captured", 1)  # holds the memory that the graph writes it into
    assert [how["defines"]["TOLD"] for _, _, how in graph] == [TOLD_MANY_WORDS] * 3
    ends: list[list[Any]] = []
    for replayed in (False, True):
        step("eager", 2)
        for p in params:
            p.detach().fill_(0.5)
            for value in optimizer.state[p].values():
                value.zero_()
        for grad, value in zip(kept["captured"], like(3, params), strict=True):
            assert grad is not None and value is not None
            grad.copy_(value)
        if replayed:
            for names, args, how in graph:
                launch(*names, args=args, **how)
            found = norm
        else:
            found = step("captured", 3)
        grads = [grad.clone() for grad in kept["captured"] if grad is not None]
        ends.append([found.clone(), *[p.detach().clone() for p in params], *grads])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert not torch.equal(params[-1], torch.full_like(params[-1], 0.5))
