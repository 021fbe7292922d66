"""Clipping that is asked for: by `clip_grad_norm_` of the kernels, and by an optimizer that takes how."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from diagnose.kernels import _clip, _gradients, clip_grad_norm_
from diagnose.kernels._optimizers import SGD, AdamW
from diagnose.kernels._swap import swap, swap_of
from torch import nn
from torch.nn.utils import clip_grad, get_total_norm

from tests.kernels_on_cpu import CpuDevice, kernels_on_cpu


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu() as device:
        yield device
        _clip.CLIPPING._tables.clear()  # no swap's end does it, and they know this device


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """With gradients."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.ones(size, dtype=dtype)) for size in (7, 3000, 40)]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(dtype)
    return params


def grads_of(params: list[nn.Parameter]) -> list[torch.Tensor]:
    return [p.grad.clone() for p in params if p.grad is not None]


@pytest.mark.parametrize("max_norm", [1e-2, 1e4])
def test_it_clips_by_torchs_formula_without_any_swap(max_norm: float, device: CpuDevice) -> None:
    before_torch = clip_grad._get_total_norm
    params = parameters()
    before = grads_of(params)
    norm = clip_grad_norm_(params, max_norm)
    torch.testing.assert_close(norm, get_total_norm(before), rtol=3e-7, atol=0)
    coef = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    assert all(torch.equal(a, b * coef) for a, b in zip(grads_of(params), before, strict=True))
    assert device.launched == ["gradient_norm", "scale"]
    assert clip_grad._get_total_norm is before_torch


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_it_may_wait_for_the_step_and_then_writes_no_gradient(clip: Any, device: CpuDevice) -> None:
    ends = []
    for defer in (False, True):
        device.launched.clear()
        params = parameters()
        optimizer = torch.optim.SGD(params, lr=1.0)
        swap(optimizer, clip=clip if defer else "exact")
        before = grads_of(params)
        clip_grad_norm_(params, 0.5, defer=defer)
        if defer:
            assert all(torch.equal(a, b) for a, b in zip(grads_of(params), before, strict=True))
            assert device.launched == ["gradient_norm"]
        optimizer.step()
        ends.append([p.detach().clone() for p in params])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-6, atol=1e-7)


def test_it_clips_at_once_where_no_step_will_take_exactly_these_gradients(device: CpuDevice) -> None:
    params = parameters()
    swap(torch.optim.SGD(params, lr=1.0))
    clip_grad_norm_(params[1:], 0.5, defer=True)
    total = get_total_norm([p.grad for p in params[1:] if p.grad is not None])
    assert total.item() == pytest.approx(0.5, rel=1e-4)
    assert device.launched[-1] == "scale"


@pytest.mark.parametrize("kind", ["one tensor", "bf16", "none", "on a cpu"])
def test_what_kernels_cannot_clip_is_clipped_by_torch(kind: str) -> None:
    ends = []
    for function in (clip_grad.clip_grad_norm_, clip_grad_norm_):
        params = parameters(torch.bfloat16 if kind == "bf16" else torch.float32)
        if kind == "none":
            params = [nn.Parameter(torch.ones(3))]
        given = params[1] if kind == "one tensor" else params
        ends.append([function(given, 0.25).detach(), *grads_of(params)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_deferred_clipping_looks_at_the_gradients_once(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look costs a third of what clipping costs the host."""
    looks = []

    def counted(tables: Any, grads: Any) -> Any:
        looks.append(len(grads))
        return look_at(tables, grads)

    look_at = _gradients.GradientTables.look_at
    monkeypatch.setattr(_gradients.GradientTables, "look_at", counted)
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=1.0)
    swap(optimizer, clip="deferred")
    clip_grad.clip_grad_norm_(params, 0.5)
    optimizer.step()
    assert looks == [3]


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_an_optimizer_of_ours_clips_as_it_was_told_and_so_do_its_copies(
    make: Any, device: CpuDevice
) -> None:
    ends = []
    for clip in ("off", "exact", "deferred"):
        params = parameters()
        made = make(params, lr=0.1, clip=clip)
        for optimizer in (made, copy.deepcopy(made)):
            device.launched.clear()
            own = [p for group in optimizer.param_groups for p in group["params"]]
            for p, grad in zip(own, grads_of(parameters()), strict=True):
                p.grad = grad
            clip_grad.clip_grad_norm_(own, 0.5)
            optimizer.step()
            update = make.__name__.lower()
            expected = {
                "off": [update],
                "exact": ["gradient_norm", "scale", update],
                "deferred": ["gradient_norm", update],
            }
            assert device.launched == expected[clip]
            ends.append([p.detach() for p in own])
            taken = swap_of(optimizer)
            assert taken is not None
            taken.remove()
    for end in ends[1:]:
        torch.testing.assert_close(end, ends[0], rtol=2e-5, atol=2e-6)


def test_how_to_clip_that_is_not_known_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="clip is 'magic'; known: exact, off, deferred"):
        AdamW([torch.zeros(2)], clip="magic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown in allow: magic"):
        SGD([torch.zeros(2)], lr=0.1, allow=["magic"])
