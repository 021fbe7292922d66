"""Clipping and unscaling by kernels, as scripts call it, at once or deferred to the step."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from diagnose.kernels._swap import swap, unswap
from torch import nn
from torch.nn.utils import clip_grad_norm_  # as a script does, before anything is replaced

from tests.kernels_on_cpu import CpuDevice, loss_of, network

pytest_plugins = ("tests.kernels_on_cpu",)

LAUNCHES = ("gradient_norm", "scale", "adamw")


def network_and_adamw() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The parameters in another order than the model's, in groups, as scripts have them."""
    model = network()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": rest, "weight_decay": 0.0}, {"params": decay}]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def grads_of(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def launched(device: CpuDevice) -> list[str]:
    """Without those that only tell the table where gradients are."""
    return [entry for entry in device.launched if entry != "patch"]


def test_gradients_that_need_no_clipping_are_not_written_and_keep_every_bit(device: CpuDevice) -> None:
    model, optimizer = network_and_adamw()
    swap(optimizer)
    loss_of(model, 0).backward()
    before = grads_of(model)
    for max_norm in (1e3, 1e3, 1e4):
        norm = clip_grad_norm_(model.parameters(), max_norm)
        expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in before]).double())
        torch.testing.assert_close(norm.double(), expected, rtol=3e-7, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(grads_of(model), before, strict=True))


@pytest.mark.parametrize("repeated", [False, True])
def test_clipped_gradients_are_those_of_torchs_formula_bit_for_bit(
    repeated: bool, device: CpuDevice
) -> None:
    """The first time the limit becomes known after the norm was measured; then it is known before."""
    model, optimizer = network_and_adamw()
    swap(optimizer)
    loss_of(model, 0).backward()
    if repeated:
        clip_grad_norm_(model.parameters(), 1e-2)
        model.zero_grad()
        loss_of(model, 1).backward()
    before = grads_of(model)
    norm = clip_grad_norm_(model.parameters(), 1e-2)
    coef = torch.clamp(1e-2 / (norm + 1e-6), max=1.0)
    assert coef < 1
    assert all(torch.equal(a, b * coef) for a, b in zip(grads_of(model), before, strict=True))


def test_a_step_with_clipping_is_three_launches_and_two_where_it_is_deferred(device: CpuDevice) -> None:
    for clip, expected in (("exact", list(LAUNCHES)), ("deferred", ["gradient_norm", "adamw"])):
        model, optimizer = network_and_adamw()
        swap(optimizer, clip=clip)  # type: ignore[arg-type]
        for _ in range(3):
            device.launched.clear()
            loss_of(model, 0).backward()
            clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            assert launched(device) == expected
        unswap(optimizer)


@pytest.mark.parametrize("max_norm", [1e-2, 1e3])
@pytest.mark.parametrize("clip", ["off", "exact", "deferred"])
def test_training_with_clipping_is_torchs(clip: Any, max_norm: float, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        if on:
            swap(optimizer, clip=clip)
        norms = []
        for number in range(4):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            norms.append(clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
        ends.append([*norms, *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_unscaling_clipping_and_skipping_together_are_torchs(clip: Any, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        if on:
            swap(optimizer, clip=clip)
        norms = []
        for number in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number == 3:
                model[0].weight.grad[1, 1] = float("inf")
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model.parameters(), 1e-2))
            if on and clip == "deferred":
                device.launched.clear()
            scaler.step(optimizer)
            scaler.update()
        ends.append([*norms, torch.tensor(scaler.get_scale()), *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)
    if clip == "deferred":
        assert launched(device) == ["adamw"]


def test_deferred_unscaling_and_clipping_read_the_gradients_twice_and_write_them_never(
    device: CpuDevice,
) -> None:
    model, optimizer = network_and_adamw()
    swap(optimizer, clip="deferred")
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for _ in range(2):
        device.launched.clear()
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(1, 50)).square().mean()).backward()
        before = grads_of(model)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1e-2)
        scaler.step(optimizer)
        scaler.update()
        assert launched(device) == ["gradient_norm", "adamw"]
        assert all(torch.equal(a, b) for a, b in zip(grads_of(model), before, strict=True))


class UnscalesHalves(torch.amp.GradScaler):
    """Unscales gradients in fp16 too, as scripts have it that train in nothing else."""

    def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)  # type: ignore[misc]


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_scaler_that_allows_gradients_in_fp16_unscales_them(clip: Any, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        scaler = UnscalesHalves("cpu", init_scale=8.0)
        if on:
            swap(optimizer, clip=clip)
        seen: list[torch.Tensor] = []
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if number != 2:
                scaler.unscale_(optimizer)
                seen += [*grads_of(model), clip_grad_norm_(model.parameters(), 1e-2)]
            scaler.step(optimizer)
            scaler.update()
        ends.append([*seen, *(p.detach() for p in model.parameters())])
    torch.testing.assert_close(ends[1], ends[0], rtol=2e-5, atol=2e-6)


def test_two_optimizers_that_are_unscaled_before_either_is_clipped_are_both_clipped(
    device: CpuDevice,
) -> None:
    """The limit becomes known between the two, after both norms were measured."""
    params = [nn.Parameter(torch.zeros(40)) for _ in range(2)]
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in params]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for optimizer in optimizers:
        swap(optimizer, clip="deferred")
        optimizer.step()  # from the next one on the scaler leaves unscaling to the kernel
    for limit in (1.0, 0.5):
        scaler.scale(torch.ones(()))
        for p, optimizer in zip(params, optimizers, strict=True):
            p.detach().zero_()
            p.grad = torch.full((40,), 12.0)
            scaler.unscale_(optimizer)
        for p in params:
            clip_grad_norm_([p], limit)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        assert [p.detach().norm().item() for p in params] == [pytest.approx(limit, rel=1e-5)] * 2


def test_gradients_changed_after_deferred_clipping_end_the_deferring_with_a_warning(
    device: CpuDevice,
) -> None:
    model, optimizer = network_and_adamw()
    taken = swap(optimizer, clip="deferred")
    loss_of(model, 0).backward()
    clip_grad_norm_(model.parameters(), 1e-2)
    for p in model.parameters():
        p.grad.add_(1e-3)
    with pytest.warns(RuntimeWarning, match="a gradient of AdamW was changed between clipping"):
        optimizer.step()
    assert taken.clip == "exact"
    device.launched.clear()
    clip_grad_norm_(model.parameters(), 1e-2)
    assert launched(device) == ["gradient_norm", "scale"]


def test_what_was_deferred_for_other_gradients_is_void(device: CpuDevice) -> None:
    """The script clipped, and then did not step."""
    ends = []
    for clipped in (False, True):
        model, optimizer = network_and_adamw()
        swap(optimizer, clip="deferred")
        loss_of(model, 0).backward()
        kept = [p.grad for p in model.parameters()]
        if clipped:
            clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        ends.append([p.detach() for p in model.parameters()])
        del kept
        unswap(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


@pytest.mark.parametrize("limits", [(1.0, 5.0), (5.0, 1.0)])
def test_gradients_clipped_twice_have_the_smaller_norm(
    limits: tuple[float, float], device: CpuDevice
) -> None:
    param = nn.Parameter(torch.zeros(40))
    optimizer = torch.optim.SGD([param], lr=1.0)
    swap(optimizer, clip="deferred")
    param.grad = torch.full((40,), 3.0)
    for limit in limits:
        clip_grad_norm_([param], limit)
    optimizer.step()
    assert param.detach().norm().item() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("clips_again", [True, False])
def test_gradients_dropped_without_a_step_leave_nothing_to_those_at_their_addresses(
    clips_again: bool, device: CpuDevice
) -> None:
    """A script that skips a step whose norm is not finite. A GPU's allocator gives the same addresses."""
    ends = []
    for on in (False, True):
        param = nn.Parameter(torch.zeros(40))
        optimizer = torch.optim.SGD([param], lr=1.0)
        if on:
            swap(optimizer, clip="deferred")
        memory = numpy.full(40, math.inf, dtype=numpy.float32)
        param.grad = torch.from_numpy(memory)
        assert math.isinf(clip_grad_norm_([param], 1.0))
        optimizer.zero_grad()
        memory[:] = 3.0
        param.grad = torch.from_numpy(memory)
        if clips_again:
            assert float(clip_grad_norm_([param], 1.0)) == pytest.approx(3 * 40**0.5)
        optimizer.step()
        ends.append(param.detach())
        unswap(optimizer)
    torch.testing.assert_close(ends[1], ends[0])


def test_what_is_deferred_when_kernels_go_is_done_in_memory(device: CpuDevice) -> None:
    model, optimizer = network_and_adamw()
    swap(optimizer, clip="deferred")
    loss_of(model, 0).backward()
    norm = clip_grad_norm_(model.parameters(), 1e-2)
    assert norm > 1e-2
    unswap(optimizer)
    clipped = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads_of(model)]))
    torch.testing.assert_close(clipped, torch.tensor(1e-2), rtol=1e-3, atol=0)


def test_a_parameter_that_is_left_to_torch_gets_its_deferred_clipping_too(device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(9))]
        optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        if on:
            swap(optimizer, clip="deferred")
        for number in range(3):
            torch.manual_seed(number)
            params[0].grad = torch.randn(5, 6).t()
            params[1].grad = torch.randn(9)
            clip_grad_norm_(params, 0.5)
            optimizer.step()
        ends.append([p.detach() for p in params])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)
    assert launched(device) == ["gradient_norm", "sgd"] * 3


@pytest.mark.parametrize(
    "options",
    [{"norm_type": 1.0}, {"norm_type": float("inf")}, {"foreach": False}, {"error_if_nonfinite": True}],
    ids=str,
)
def test_what_the_kernels_do_not_know_is_torchs_own(options: dict[str, Any], device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        if on:
            swap(optimizer)
        loss_of(model, 0).backward()
        ends.append([clip_grad_norm_(model.parameters(), 1e-2, **options), *grads_of(model)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert launched(device) == []


@pytest.mark.parametrize("kind", ["bf16", "shared", "none", "gaps", "differentiable"])
def test_gradients_that_the_kernels_cannot_clip_exactly_are_clipped_by_torch(
    kind: str, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        params = [nn.Parameter(torch.zeros(8, dtype=dtype)) for _ in range(2)]
        optimizer = torch.optim.AdamW(params)
        if on:
            swap(optimizer)
        if kind != "none":
            for p in params:
                p.grad = torch.randn(8).to(dtype)
        if kind == "shared":
            params[0].grad = params[1].grad
        if kind == "gaps":
            params[0].grad = torch.randn(16)[::2]
        if kind == "differentiable":
            params[0].grad = torch.randn(8, requires_grad=True) * 1
        norm = clip_grad_norm_(params, 0.1)
        ends.append([norm.detach(), *(p.grad.detach().clone() for p in params if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert launched(device) == []
