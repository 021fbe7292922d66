"""Channels last with moments of one byte, whose scales are of what lies together in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from diagnose.kernels._optimizer_8bit import AdamW8bit
from diagnose.kernels._swap import swap_of
from torch import nn

from diagnose.actions.channels_last import ChannelsLast
from diagnose.actions.eight_bit_states import EightBitStates
from diagnose.core.job import Job
from tests.kernels_on_cpu import kernels_on_cpu
from tests.test_actions_layout import _prepared
from tests.toggled import assert_equal, weights


def uneven(kind: Any = AdamW8bit) -> tuple[nn.Sequential, Job]:
    """A model after some steps; its weight has several blocks, and gradients that differ widely within an
    output channel and do not depend on what it is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 8, 3, padding=1), nn.Flatten())
    optimizer = kind(model.parameters(), lr=1e-3)
    job = Job(models=[model], optimizers=[optimizer])
    for number in range(3):
        a_step(model, optimizer, number)
    return model, job


def a_step(model: nn.Module, optimizer: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    scale_C = torch.logspace(0, 3, 32).view(1, 32, 1, 1)
    output = model(torch.randn(4, 32, 6, 6, generator=generator) * scale_C)
    (output * torch.randn(output.shape, generator=generator)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def moments(optimizer: Any) -> list[torch.Tensor]:
    """Those of the first weight, as a checkpoint shows them."""
    shown = optimizer.state_dict()["state"][0]
    return [shown["exp_avg"].clone(), shown["exp_avg_sq"].clone()]


def assert_as_coded(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    """But for what another division into blocks rounds."""
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).norm() < 0.05 * other.norm()


@contextmanager
def converted(job: Job) -> Iterator[None]:
    action = ChannelsLast()
    action.check(job)
    before = action.state(job)
    with action.apply(job, _prepared(job)):
        yield
    action.verify_undone(job, before)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_moments_of_one_byte_stay_with_their_elements_there_and_back(on_cpu: bool) -> None:
    with nullcontext() if on_cpu else kernels_on_cpu():
        (model, job), (plain, twin) = uneven(), uneven()
        optimizer = job.optimizers[0]
        before = moments(optimizer)
        with converted(job):
            assert_equal(moments(optimizer), before)
        assert_equal(moments(optimizer), before)
        for number in range(3, 9):
            with converted(job) if number % 4 < 2 else nullcontext():
                a_step(model, optimizer, number)
                a_step(plain, twin.optimizers[0], number)
                saved = moments(optimizer)
                assert_as_coded(saved, moments(twin.optimizers[0]))
                assert all(each.is_contiguous() for each in saved), "a checkpoint has the usual layout"
        assert_as_coded(weights(model), weights(plain))


def test_the_kernel_goes_on_in_the_other_layout_after_one_step_without() -> None:
    with kernels_on_cpu() as device:
        model, job = uneven()
        with converted(job):
            for number in range(3):
                a_step(model, job.optimizers[0], number)
            state = job.optimizers[0].state[model[0].weight]
            assert state["exp_avg_codes"].stride() == model[0].weight.stride()
            swap = swap_of(job.optimizers[0])
            assert swap is not None and not swap.stepper.left
        assert device.launched.count("adamw_8bit") == 6


@pytest.mark.parametrize("first", [ChannelsLast, EightBitStates])
def test_moments_coded_by_an_action_stay_with_their_elements_in_any_order(first: Any) -> None:
    """And a checkpoint has the usual layout, whichever was put in force first and is taken out first."""
    second = EightBitStates if first is ChannelsLast else ChannelsLast
    with kernels_on_cpu():
        (model, job), (plain, twin) = uneven(torch.optim.AdamW), uneven(torch.optim.AdamW)
        optimizer, other = job.optimizers[0], twin.optimizers[0]
        opened = {}
        for kind in (first, second):
            action: Any = kind()
            with action.prepare(job, None) as prepared:
                opened[kind] = action.apply(job, prepared)
                opened[kind].__enter__()
            a_step(model, optimizer, 3)
            a_step(plain, other, 3)
            assert_as_coded(moments(optimizer), moments(other))
            assert all(each.is_contiguous() for each in moments(optimizer))
        opened[first].__exit__(None, None, None)
        assert_as_coded(moments(optimizer), moments(other))
        a_step(model, optimizer, 4)
        a_step(plain, other, 4)
        assert_as_coded(moments(optimizer), moments(other))
        opened[second].__exit__(None, None, None)
        assert_as_coded(moments(optimizer), moments(other))
        assert all(each.stride() == model[0].weight.stride() for each in moments(optimizer))
        assert model[0].weight.is_contiguous()
