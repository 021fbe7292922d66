"""Optimizers of other libraries, and wrappers: the real ones, where they are installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from diagnose.kernels._swap import support, swap, unswap

from tests.kernels_on_cpu import CpuDevice, loss_of, network

pytest_plugins = ("tests.kernels_on_cpu",)

LIONS = ["lion_pytorch", "timm.optim"]


def lion(module: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    pytest.importorskip(module)
    made: torch.optim.Optimizer = importlib.import_module(module).Lion(params, lr=1e-2, **options)
    return made


@pytest.mark.parametrize("module", LIONS)
def test_lion_of_another_library_trains_as_by_itself_and_goes_on_by_itself(
    module: str, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model = network()
        optimizer = lion(module, model.parameters(), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        for number in range(6):
            if on and number == 1:
                taken = swap(optimizer)
            if on and number == 4:
                assert taken.stepper.left == []
                unswap(optimizer)
            optimizer.zero_grad()
            loss_of(model, number).backward()
            optimizer.step()
            scheduler.step()
        state = optimizer.state_dict()["state"]
        assert all(set(each) == {"exp_avg"} for each in state.values())
        ends.append([p.detach() for p in model.parameters()] + [each["exp_avg"] for each in state.values()])
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)
    assert device.launched == ["lion"] * 3


@pytest.mark.parametrize(
    "module, options, reason",
    [
        ("lion_pytorch", {"decoupled_weight_decay": True}, "its weight decay is divided by its first rate"),
        ("timm.optim", {"caution": True}, "it is cautious"),
        (
            "timm.optim",
            {"corrected_weight_decay": True},
            "its weight decay is corrected by its largest rate",
        ),
    ],
)
def test_what_of_it_no_kernel_does_is_refused(
    module: str, options: dict[str, Any], reason: str, device: CpuDevice
) -> None:
    assert support(lion(module, network().parameters(), **options)) == [reason]


def test_a_class_with_a_setting_that_is_not_known_is_refused(device: CpuDevice) -> None:
    """As a later version of the library may have."""

    class Lion(torch.optim.SGD):
        decoupled_wd = False

    Lion.__module__, Lion.__qualname__ = "lion_pytorch.lion_pytorch", "Lion"
    [reason] = support(Lion(network().parameters(), lr=0.1))
    assert reason.startswith("it has settings that its kernel does not know: dampening, ")


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_accelerate_trains_as_without_kernels_and_sees_which_steps_are_skipped(
    clip: Any, device: CpuDevice
) -> None:
    accelerate = pytest.importorskip("accelerate")
    ends, skips = [], []
    for on in (False, True):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        accelerator = accelerate.Accelerator(cpu=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        wrapped = accelerate.optimizer.AcceleratedOptimizer(optimizer, scaler=scaler)
        if on:
            swap(optimizer, clip=clip)
        skipped = []
        for number in range(5):
            wrapped.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number == 3:
                model[2].bias.grad[0] = float("inf")
            scaler.unscale_(optimizer)
            accelerator.clip_grad_norm_(model.parameters(), 1e-2)
            wrapped.step()
            skipped.append(wrapped.step_was_skipped)
        ends.append([p.detach() for p in model.parameters()])
        skips.append(skipped)
        unswap(optimizer)
    assert skips[0] == skips[1] == [False, False, False, True, False]
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)
    assert "adamw" in device.launched and "gradient_norm" in device.launched
