"""Kernels under live optimizers on a GPU: numbers, swaps, checkpoints, scalers."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnose.kernels._swap import support, swap, unswap
from torch import nn
from torch.nn.utils import clip_grad_norm_

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam-maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd-nesterov": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd-dampening": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5),
}

SIZES = (1, 3, 1023, 4097, 100_003)

TOLERANCES = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-6},
    torch.bfloat16: {"rtol": 2.0**-6, "atol": 4e-3},
    torch.float16: {"rtol": 2.0**-8, "atol": 1e-3},
}
"""Of weights after a few steps: units in the last place of 16 bits; in fp32 what torch's own two ways
differ by, which round the first bias corrections differently."""


def fused(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The same in torch's fused way, which computes 16 bits in 32."""
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    optimizer.defaults["fused"] = True
    return optimizer


def params_on(place: torch.device, dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator).to(place, dtype)) for size in SIZES]


def give_grads(params: list[nn.Parameter], number: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number + 1)
    for param in params:
        grad = torch.randn(param.shape, generator=generator) * scale
        param.grad = grad.to(param.device, param.dtype)


def network(place: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3)).to(place)


def backward(model: nn.Module, place: torch.device, number: int) -> None:
    batch = torch.randn(4, 50, generator=torch.Generator().manual_seed(number)).to(place)
    model(batch).square().mean().backward()


def everything(params: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights and all of the optimizer's state, as a checkpoint shows it."""
    state = optimizer.state_dict()["state"]
    held = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in [*params, *held]]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Bit for bit, on the same device."""
    assert [(each.device, each.dtype) for each in ours] == [(each.device, each.dtype) for each in theirs]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_weights_are_torchs(name: str, dtype: torch.dtype, place: torch.device) -> None:
    ends = []
    for on in (False, True):
        params = params_on(place, dtype)
        optimizer = MAKERS[name](params)
        # torch 2.13's fused SGD is wrong for 16 bits on a CPU, where this may be rehearsed
        if place.type == "cuda" or not name.startswith("sgd"):
            optimizer = fused(optimizer)
        taken = swap(optimizer) if on else None
        for number in range(5):
            give_grads(params, number)
            optimizer.step()
        assert taken is None or taken.stepper.left == []
        ends.append([param.detach() for param in params])
    torch.testing.assert_close(ends[1], ends[0], **TOLERANCES[dtype])


@pytest.mark.parametrize("clip", ["exact", "deferred"])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_clipped_steps_are_torchs(clip: Any, max_norm: float, place: torch.device) -> None:
    ends, norms = [], []
    for on in (False, True):
        params = params_on(place, torch.float32)
        optimizer = MAKERS["sgd-nesterov"](params)  # Adam would forgive a wrong factor
        if on:
            swap(optimizer, clip=clip)
        for number in range(4):
            give_grads(params, number)
            norms.append(float(clip_grad_norm_(params, max_norm)))
            optimizer.step()
        ends.append([param.detach() for param in params])
        unswap(optimizer)
    assert norms[:4] == pytest.approx(norms[4:], rel=1e-6)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=1e-6)


def test_gradients_that_need_no_clipping_keep_every_bit(place: torch.device) -> None:
    params = params_on(place, torch.float32)
    optimizer = MAKERS["adamw"](params)
    swap(optimizer)
    give_grads(params, 0)
    before = [param.grad.clone() for param in params if param.grad is not None]
    for _ in range(2):
        clip_grad_norm_(params, 1e9)
    assert_equal([param.grad for param in params if param.grad is not None], before)
    unswap(optimizer)


@pytest.mark.parametrize("name", MAKERS)
def test_swapping_in_and_out_trains_as_torch_does(name: str, place: torch.device) -> None:
    ends = []
    for on in (False, True):
        model = network(place)
        optimizer = MAKERS[name](model.parameters())
        for number in range(8):
            if on and number in (2, 5):
                swap(optimizer)
            if on and number in (3, 7):
                unswap(optimizer)
            backward(model, place, number)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(everything(model.parameters(), optimizer))
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-4, atol=5e-6)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov"])
def test_checkpoints_go_both_ways(name: str, is_fused: bool, place: torch.device) -> None:
    def made(params: Any) -> torch.optim.Optimizer:
        return fused(MAKERS[name](params)) if is_fused else MAKERS[name](params)

    source = params_on(place, torch.float32)
    optimizer = made(source)
    swap(optimizer)
    for number in range(3):
        give_grads(source, number)
        optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    saved = torch.load(io.BytesIO(file.getvalue()))

    plain = [nn.Parameter(param.detach().clone()) for param in source]
    resumed = made(plain)
    resumed.load_state_dict(saved)
    assert_equal(everything(plain, resumed), everything(source, optimizer))

    back = [nn.Parameter(param.detach().clone()) for param in source]
    again = made(back)
    swap(again)
    again.load_state_dict(resumed.state_dict())
    for number in range(3, 6):
        for params, each in ((source, optimizer), (back, again)):
            give_grads(params, number)
            each.step()
    assert_equal(everything(back, again), everything(source, optimizer))


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_scaler_skips_the_step_with_an_infinity(clip: Any, place: torch.device) -> None:
    """The scales are powers of two: the bits are those of training without the skipped step."""
    ends = []
    for scaled in (False, True):
        params = params_on(place, torch.float32)
        optimizer = MAKERS["adamw"](params)
        taken = swap(optimizer, clip=clip)
        scaler = torch.amp.GradScaler(place.type, init_scale=1024.0, growth_interval=3, enabled=scaled)
        scaler.scale(torch.ones((), device=place))
        for number in range(7):
            if number == 4 and not scaled:
                continue
            give_grads(params, number, scaler.get_scale())
            if number == 4:
                assert params[3].grad is not None
                params[3].grad[-1] = math.inf
            scaler.unscale_(optimizer)
            clip_grad_norm_(params, 10.0)
            scaler.step(optimizer)
            scaler.update()
        assert taken.stepper.left == []
        ends.append(everything(params, optimizer))
        unswap(optimizer)
    assert_equal(ends[1], ends[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_under_a_scaler_gradients_end_as_with_torchs_fused_step_also_where_it_is_skipped(
    dtype: torch.dtype, place: torch.device
) -> None:
    """Bit for bit, by a factor that divides with a remainder. Torch scales no bfloat16 on a GPU."""
    ends: list[list[torch.Tensor]] = []
    for on in (False, True):
        params = params_on(place, dtype)
        optimizer = torch.optim.AdamW(params, lr=1e-2, fused=True)
        if on:
            swap(optimizer)
        scaler = torch.amp.GradScaler(place.type, init_scale=24.0, backoff_factor=0.7)
        scaler.scale(torch.ones((), device=place))
        ends.append([])
        for number in range(4):
            give_grads(params, number, 24.0)
            if number == 1:
                assert params[3].grad is not None
                params[3].grad[-1] = math.inf
            scaler.step(optimizer)
            scaler.update()
            ends[-1] += [param.grad.clone() for param in params if param.grad is not None]
        unswap(optimizer)
    assert_equal(ends[1], ends[0])


def test_a_gradient_that_is_not_a_number_spreads_as_by_torch(place: torch.device) -> None:
    found = []
    for on in (False, True):
        params = params_on(place, torch.float32)
        optimizer = MAKERS["adamw"](params)
        if on:
            swap(optimizer)
        give_grads(params, 0)
        assert params[2].grad is not None
        params[2].grad[5] = math.nan
        optimizer.step()
        found.append([torch.isnan(param).nonzero().tolist() for param in params])
        unswap(optimizer)
    assert found[0] == found[1] == [[], [], [[5]], [], []]


def test_an_optimizer_here_is_supported(gpu: torch.device) -> None:
    assert support(MAKERS["adamw"](params_on(gpu, torch.float32))) == []
