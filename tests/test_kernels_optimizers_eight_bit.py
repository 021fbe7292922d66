"""Our own AdamW with moments of one byte: near to AdamW's, in its checkpoints, with their elements."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diagnose.kernels._optimizer_8bit import AdamW8bit
from torch import nn

from tests.kernels_on_cpu import CpuDevice, kernels_on_cpu, network, step
from tests.test_kernels_optimizers import trained

pytest_plugins = ("tests.kernels_on_cpu",)


def eight_bits(params: Any) -> torch.optim.Optimizer:
    return AdamW8bit(params, lr=1e-2)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_moments_of_one_byte_train_nearly_as_adamw(on_cpu: bool) -> None:
    """Within a tenth of the way that AdamW has gone; the first step, from moments of zero, is AdamW's."""
    for steps, share in ((1, 1e-4), (8, 0.1)):
        with nullcontext() if on_cpu else kernels_on_cpu():
            mine = list(trained(eight_bits, steps)[0].parameters())
        theirs = list(trained(lambda p: torch.optim.AdamW(p, lr=1e-2), steps)[0].parameters())
        for got, expected, start in zip(mine, theirs, network().parameters(), strict=True):
            assert (got - expected).norm() < share * (expected - start).norm()


def test_moments_of_one_byte_take_two_bytes_for_a_parameter_and_little_more(device: CpuDevice) -> None:
    weight = nn.Parameter(torch.randn(64, 256))
    optimizer = eight_bits([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(value.nbytes for value in optimizer.state[weight].values())
    assert held <= weight.numel() * (2 + 8 / 256) + 4


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_one_byte_moments_is_adamws_and_loading_it_changes_no_code(
    dtype: torch.dtype, on_cpu: bool
) -> None:
    def make() -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        shape = (4, 30, 3, 3)
        first = torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)
        params = [nn.Parameter(first), nn.Parameter(torch.randn(7, dtype=dtype))]
        return params, eight_bits(params)

    with nullcontext() if on_cpu else kernels_on_cpu():
        params, optimizer = make()
        for number in range(3):
            torch.manual_seed(number)
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        plain = torch.optim.AdamW(params)
        plain.load_state_dict(copy.deepcopy(saved))  # torch takes the counts as they are, and counts on
        plain.step()
        assert {state["step"].item() for state in plain.state.values()} == {4.0}
        others, other = make()
        other.load_state_dict(saved)
        for p, q in zip(params, others, strict=True):
            for name in ("exp_avg_codes", "exp_avg_sq_codes"):
                mine, loaded = optimizer.state[p][name].int(), other.state[q][name].int()
                changed = (mine != loaded).float().mean()
                assert changed == 0 if dtype is torch.float32 else changed < 0.2, name
        for q in others:
            q.grad = torch.ones_like(q)
        other.step()
        assert {state["step"].item() for state in other.state.values()} == {4.0}


def test_one_byte_moments_take_over_from_a_checkpoint_of_adamws(device: CpuDevice) -> None:
    model, adamw = trained(lambda p: torch.optim.AdamW(p, lr=1e-2), 4)
    mine = eight_bits(model.parameters())
    mine.load_state_dict({**mine.state_dict(), "state": copy.deepcopy(adamw.state_dict()["state"])})
    saved = mine.state_dict()["state"]
    for index, p in enumerate(model.parameters()):
        m = saved[index]["exp_avg"]
        assert (m - adamw.state[p]["exp_avg"]).norm() < 0.05 * m.norm()
    step(model, mine, 4)
    assert device.launched[-1] == "adamw_8bit"
    assert {state["step"].item() for state in mine.state.values()} == {5.0}


def test_moments_of_a_checkpoint_that_lie_in_another_order_stay_with_their_elements(
    device: CpuDevice,
) -> None:
    weight = nn.Parameter(torch.randn(4, 30, 3, 3))
    adamw = torch.optim.AdamW([weight], lr=1e-2)
    weight.grad = torch.randn_like(weight)
    adamw.step()
    turned = nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
    mine = eight_bits([turned])
    mine.load_state_dict({**mine.state_dict(), "state": copy.deepcopy(adamw.state_dict()["state"])})
    for name in ("exp_avg", "exp_avg_sq"):
        m = mine.state_dict()["state"][0][name]
        assert (m - adamw.state[weight][name]).norm() < 0.05 * m.norm()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_moments_of_a_parameter_that_the_script_turns_stay_with_their_elements(on_cpu: bool) -> None:
    """As `model.to(memory_format=torch.channels_last)` turns it, after the first steps."""
    ends = []
    for turns in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 300, 3, 3))
        scale = torch.logspace(0, 3, 300).view(1, 300, 1, 1)
        with nullcontext() if on_cpu else kernels_on_cpu():
            mine = eight_bits([weight])
            for number in range(4):
                if turns and number == 2:
                    before = mine.state_dict()["state"][0]["exp_avg"].clone()
                    weight.data = weight.data.to(memory_format=torch.channels_last)
                    assert torch.equal(mine.state_dict()["state"][0]["exp_avg"], before)
                weight.grad = torch.randn(4, 300, 3, 3) * scale
                mine.step()
            ends.append(mine.state_dict()["state"][0])
            assert mine.state[weight]["exp_avg_codes"].stride() == weight.stride()
    for name in ("exp_avg", "exp_avg_sq"):
        assert (ends[1][name] - ends[0][name]).norm() < 0.05 * ends[0][name].norm()


def test_copies_of_one_byte_moments_keep_the_codes(device: CpuDevice) -> None:
    _, optimizer = trained(eight_bits, steps=2)
    twin = pickle.loads(pickle.dumps(optimizer))
    saved = [list(each.state_dict()["state"].values()) for each in (optimizer, twin)]
    for one, other in zip(*saved, strict=True):
        assert set(one) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(one[name], other[name]) for name in one)
