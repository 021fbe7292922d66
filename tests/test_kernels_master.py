"""fp32 masters of parameters in 16 bits: what is stepped, what is saved, and what others write."""

from __future__ import annotations

import copy
import io
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from diagnose.kernels._optimizer_master import MasterAdamW
from torch import nn

from tests.kernels_on_cpu import CpuDevice, kernels_on_cpu

pytest_plugins = ("tests.kernels_on_cpu",)

DTYPES = [torch.bfloat16, torch.float16]
TINY_LR = 2.0**-12
"""A step by so much does not move a weight of 1 in bf16, whose next number is 2^-8 away."""


def place(by_kernels: bool) -> AbstractContextManager[Any]:
    return kernels_on_cpu() if by_kernels else nullcontext()


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """In two orders in memory, of sizes in one chunk and several, and one that needs no master."""
    torch.manual_seed(0)
    shapes = [torch.randn(3, 700), torch.randn(40, 600).t(), torch.randn(7)]
    return [*(nn.Parameter(each.to(dtype)) for each in shapes), nn.Parameter(torch.randn(90))]


def give_grads(params: list[nn.Parameter], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in params:
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


def trained(dtype: torch.dtype, steps: int, **options: Any) -> tuple[list[nn.Parameter], MasterAdamW]:
    params = parameters(dtype)
    optimizer = MasterAdamW(params, lr=1e-2, weight_decay=0.1, **options)
    for number in range(steps):
        give_grads(params, number)
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("by_kernels", [False, True])
@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"maximize": True}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_train_as_fp32_weights_of_torchs_do_and_parameters_are_their_rounding(
    dtype: torch.dtype, options: dict[str, bool], by_kernels: bool
) -> None:
    with place(by_kernels):
        params, optimizer = trained(dtype, 4, **options)
    wide = [nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    theirs = torch.optim.AdamW(wide, lr=1e-2, weight_decay=0.1, foreach=False, **options)
    for number in range(4):
        narrow = parameters(dtype)
        give_grads(narrow, number)
        for p, q in zip(wide, narrow, strict=True):
            assert q.grad is not None
            p.grad = q.grad.float()
        theirs.step()
    for p, q in zip(params, wide, strict=True):
        master = optimizer.state[p].get("master_param", p)
        torch.testing.assert_close(master, q, rtol=2e-5, atol=2e-6)
        assert torch.equal(p, master.to(p.dtype))
    assert all(p.stride() == q.stride() for p, q in zip(params, parameters(dtype), strict=True))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch ties gradients' types")
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_may_be_kept_in_fp32_for_parameters_in_16_bits(dtype: torch.dtype) -> None:
    """As they are where many micro-batches add up. torch's own optimizers step none of these."""
    ends = []
    for by_kernels in (False, True):
        with place(by_kernels) as device:
            params = parameters(dtype)
            for p in params:
                p.grad_dtype = torch.float32
            optimizer = MasterAdamW(params, lr=1e-2)
            for number in range(3):
                generator = torch.Generator().manual_seed(number)
                for p in params:
                    p.grad = torch.empty_like(p, dtype=torch.float32)
                    p.grad.copy_(torch.randn(p.shape, generator=generator))
                optimizer.step()
            if by_kernels:
                assert device.launched == ["adamw"] * 3
            ends.append([optimizer.state[p].get("master_param", p).detach() for p in params])
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)


def test_one_launch_steps_the_masters_and_writes_the_parameters(device: CpuDevice) -> None:
    trained(torch.bfloat16, 3)
    assert device.launched == ["adamw"] * 3


@pytest.mark.parametrize("by_kernels", [False, True])
def test_steps_too_small_for_16_bits_add_up(by_kernels: bool) -> None:
    weight = nn.Parameter(torch.ones(500, dtype=torch.bfloat16))
    with place(by_kernels):
        optimizer = MasterAdamW([weight], lr=TINY_LR, weight_decay=0.0)
        for _ in range(64):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    assert bool((weight == 1 - 64 * TINY_LR).all())


@pytest.mark.parametrize(
    "saved_by_kernels, loaded_by_kernels", [(True, True), (True, False), (False, True)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_checkpoint_is_gone_on_from_with_every_bit_of_the_masters(
    dtype: torch.dtype, saved_by_kernels: bool, loaded_by_kernels: bool
) -> None:
    with place(saved_by_kernels):
        params, optimizer = trained(dtype, 3)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        saved = torch.load(io.BytesIO(file.getvalue()))
    resumed_params = [nn.Parameter(p.detach().clone()) for p in params]
    with place(loaded_by_kernels):
        resumed = MasterAdamW(resumed_params, lr=1e-2, weight_decay=0.1)
        resumed.load_state_dict(saved)
        for p, q in zip(params, resumed_params, strict=True):
            for name, value in optimizer.state[p].items():
                assert torch.equal(value, resumed.state[q][name]), name
        give_grads(resumed_params, 3)
        resumed.step()
    with place(saved_by_kernels):
        give_grads(params, 3)
        optimizer.step()
    pairs = zip(params, resumed_params, strict=True)
    masters = [
        (optimizer.state[p].get("master_param", p), resumed.state[q].get("master_param", q))
        for p, q in pairs
    ]
    torch.testing.assert_close([ours for ours, _ in masters], [theirs for _, theirs in masters])


def test_plain_adamw_goes_on_from_a_checkpoint_and_this_from_one_of_adamws(device: CpuDevice) -> None:
    params, optimizer = trained(torch.bfloat16, 3)
    plain = torch.optim.AdamW(params, lr=1e-2)
    plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert plain.state[params[0]]["exp_avg"].dtype is torch.bfloat16, "as torch keeps it"
    give_grads(params, 3)
    plain.step()
    back = MasterAdamW(params, lr=1e-2)
    back.load_state_dict(torch.optim.AdamW(params).state_dict() | {"state": _without_masters(plain)})
    for p in params[:3]:
        assert torch.equal(back.state[p]["master_param"], p.float())
    give_grads(params, 4)
    back.step()
    assert {float(state["step"]) for state in back.state.values()} == {5.0}


def _without_masters(optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
    return {
        index: {name: value for name, value in state.items() if name != "master_param"}
        for index, state in optimizer.state_dict()["state"].items()
    }


@pytest.mark.parametrize("by_kernels", [False, True])
def test_what_others_write_into_a_parameter_is_taken_over_and_the_rest_keeps_its_bits(
    by_kernels: bool,
) -> None:
    with place(by_kernels):
        params, optimizer = trained(torch.bfloat16, 2)
        before = optimizer.state[params[0]]["master_param"].clone()
        with torch.no_grad():
            params[0][0] = 5.0
        for p in params:
            p.grad = None
        params[0].grad = torch.zeros_like(params[0])
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
    after = optimizer.state[params[0]]["master_param"]
    assert bool((after[0] == 5.0).all())
    assert torch.equal(after[1:], before[1:])


def test_a_gradient_in_another_order_is_left_to_the_plain_step_with_the_same_state(
    device: CpuDevice,
) -> None:
    params, optimizer = trained(torch.bfloat16, 2)
    give_grads(params, 2)
    assert params[1].grad is not None
    params[1].grad = params[1].grad.contiguous()
    optimizer.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
    for p in params[:3]:
        assert torch.equal(p, optimizer.state[p]["master_param"].to(p.dtype))
