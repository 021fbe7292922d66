"""Kernels under a gradient scaler: steps that it skips, and gradients that are left scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnose.kernels._swap import AMP, swap, unswap
from torch import nn

from tests.kernels_on_cpu import (
    MAKERS,
    CpuDevice,
    assert_close,
    assert_equal,
    everything,
    loss_of,
    network,
    network_and,
)

pytest_plugins = ("tests.kernels_on_cpu",)


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_gradient_scaler_skips_the_step_with_an_infinity(clip: Any, device: CpuDevice) -> None:
    """The scales are powers of two: without the skipped step the bits are those of training without one."""
    ends, counts = [], []
    for scaled in (False, True):
        model, optimizer = network_and("adamw")
        swap(optimizer, clip=clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
        for number in range(7):
            if number == 4 and not scaled:
                continue
            optimizer.zero_grad()
            loss = scaler.scale(loss_of(model, number))
            loss.backward()
            if number == 4:
                model[0].weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        ends.append(everything(model, optimizer))
        counts.append({each["step"].item() for each in optimizer.state_dict()["state"].values()})
        assert not hasattr(optimizer, "grad_scale")
    assert counts == [{6.0}, {6.0}]
    assert_equal(ends[1], ends[0])


@pytest.mark.parametrize("name", ["sgd-dampening", "adamw"])
def test_a_first_step_that_is_skipped_leaves_no_state_that_torch_would_go_wrong_with(
    name: str, device: CpuDevice
) -> None:
    ends = []
    for skipped in (False, True):
        model, optimizer = network_and(name)
        swap(optimizer, clip="deferred")
        optimizer.step()  # without gradients: from the next one on the scaler leaves skipping to the kernel
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in [9, 0, 1] if skipped else [0, 1]:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number == 9:
                model[0].bias.grad[0] = float("nan")
            scaler.step(optimizer)
            scaler.update()
            if number == 9:
                saved = optimizer.state_dict()
                assert all(each.get("step", 0) == 0 for each in saved["state"].values())
                assert not any("momentum_buffer" in each for each in saved["state"].values())
                unswap(optimizer)
                optimizer.load_state_dict(saved)
                swap(optimizer, clip="deferred")
                assert "adamw" in device.launched or "sgd" in device.launched
        ends.append(everything(model, optimizer))
    assert_equal(ends[1], ends[0])


def test_only_deferring_lets_the_scaler_hand_over_scaled_gradients(device: CpuDevice) -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    swap(optimizer)
    assert not hasattr(optimizer, AMP)
    unswap(optimizer)
    swap(optimizer, clip="deferred")
    optimizer.step()
    assert getattr(optimizer, AMP)
    unswap(optimizer)
    assert AMP not in vars(optimizer)


def test_a_fused_optimizer_of_torchs_leaves_gradients_unscaled_as_torch_does(device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if on:
            swap(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        for number in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert optimizer._step_supports_amp_scaling
        ends.append([*everything(model, optimizer), *[p.grad.clone() for p in model.parameters()]])
    assert_close(ends[1], ends[0])


class Accelerated:
    """What `accelerate.AcceleratedOptimizer` does with an optimizer: it takes its `step` at birth, puts it
    back around every step, and learns from whether it was called whether the scaler skipped it."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        self.optimizer, self.scaler = optimizer, scaler
        optimizer.load_state_dict(optimizer.state_dict())
        self._original, self._called = optimizer.step, False
        self.skipped: list[bool] = []

    def step(self) -> None:
        def patched(*args: Any, **kwargs: Any) -> Any:
            self._called = True
            return self._original(*args, **kwargs)

        self._called = False
        patched.__module__ = "accelerate.optimizer"
        self.optimizer.step = patched  # type: ignore[method-assign]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.step = self._original  # type: ignore[method-assign]
        self.skipped.append(not self._called)


@pytest.mark.parametrize("swapped_at, clip", [(0, "exact"), (2, "exact"), (0, "deferred"), (2, "deferred")])
def test_a_wrapper_that_keeps_the_step_method_still_sees_which_steps_are_skipped(
    swapped_at: int, clip: Any, device: CpuDevice
) -> None:
    ends, skips = [], []
    for on in (False, True):
        model, optimizer = network_and("adamw")
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        if on and swapped_at == 0:
            swap(optimizer, clip=clip)
        wrapper = Accelerated(optimizer, scaler)
        for number in range(5):
            if on and number == swapped_at == 2:
                swap(optimizer, clip=clip)
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number == 3:
                model[2].bias.grad[0] = float("inf")
            wrapper.step()
        ends.append(everything(model, optimizer))
        skips.append(wrapper.skipped)
    assert skips[0] == skips[1] == [False, False, False, True, False]
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize(
    "kind, dtype",
    [("AdamW", torch.float32), ("Adam", torch.float32), ("AdamW", torch.bfloat16), ("SGD", torch.float32)],
)
def test_under_a_scaler_gradients_end_as_with_torchs_fused_step_also_where_it_is_skipped(
    kind: str, dtype: torch.dtype, device: CpuDevice
) -> None:
    """Divided where the step takes place, else as they were: bit for bit, by a factor with a remainder."""
    ends = []
    for on in (False, True):
        params = [nn.Parameter(torch.linspace(0.5, 2, size).to(dtype)) for size in (7, 3000)]
        optimizer = getattr(torch.optim, kind)(params, lr=1e-2, fused=True)
        if on:
            swap(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=24.0, backoff_factor=0.7)
        seen: list[torch.Tensor] = []
        for number in range(4):
            scaler.scale(torch.ones(()))
            generator = torch.Generator().manual_seed(number)
            for p in params:
                p.grad = (torch.randn(p.shape, generator=generator) * 24).to(dtype)
            if number == 1:
                params[1].grad[-1] = float("inf")
            device.launched.clear()
            scaler.step(optimizer)
            scaler.update()
            seen += [p.grad.clone() for p in params]
            update = "sgd" if kind == "SGD" else "adamw"
            assert device.launched == (["gradient_norm", update] if on else [])
        ends.append((seen, [p.detach().clone() for p in params], [torch.tensor(scaler.get_scale())]))
        counts = [state["step"].item() for state in optimizer.state.values() if "step" in state]
        assert set(counts) <= {3.0}
    assert_equal(ends[1][0], ends[0][0])
    assert_equal(ends[1][2], ends[0][2])
    rtol = 2e-5 if dtype is torch.float32 else 2.0**-7
    torch.testing.assert_close(ends[1][1], ends[0][1], rtol=rtol, atol=2e-6)
