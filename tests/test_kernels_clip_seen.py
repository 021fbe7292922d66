"""What a script sees of clipping by kernels: norms, halves, warnings, lists, streams, kernels that fail."""

from __future__ import annotations

import gc
import math
import threading
import time
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diagnose.kernels import _gradients
from diagnose.kernels._swap import swap, unswap
from torch import nn
from torch.nn.utils import clip_grad, clip_grad_norm_  # as a script does, before anything is replaced

from tests.kernels_on_cpu import CpuDevice, failing, loss_of, without
from tests.test_kernels_clip import LAUNCHES, grads_of, launched, network_and_adamw

pytest_plugins = ("tests.kernels_on_cpu",)


def test_the_norm_of_gradients_without_elements_is_zero(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [nn.Parameter(torch.zeros(0)) for _ in range(2)]
    swap(torch.optim.AdamW(params))
    for p in params:
        p.grad = torch.zeros(0)
    monkeypatch.setattr(torch, "empty", lambda *shape, **how: torch.full(shape, math.nan, **how))
    assert clip_grad_norm_(params, 1.0) == 0.0


@pytest.mark.parametrize("max_norm", [1.0, math.inf])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_does_to_gradients_what_torch_does(
    value: float, max_norm: float, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        if on:
            swap(optimizer)
        loss_of(model, 0).backward()
        clip_grad_norm_(model.parameters(), max_norm)  # from now on the limit is known to the kernel
        model[0].weight.grad[0, 0] = value
        ends.append([clip_grad_norm_(model.parameters(), max_norm), *grads_of(model)])
    torch.testing.assert_close(ends[1], ends[0], rtol=0, atol=0, equal_nan=True)


def test_the_halves_used_alone_are_torchs(device: CpuDevice) -> None:
    model, optimizer = network_and_adamw()
    loss_of(model, 0).backward()
    swap(optimizer)
    norm = clip_grad._get_total_norm([p.grad for p in model.parameters()])
    clip_grad._clip_grads_with_norm_(model.parameters(), 1e-2, norm * 2)
    total = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in grads_of(model)]))
    torch.testing.assert_close(total, torch.tensor(5e-3), rtol=1e-3, atol=0)
    assert launched(device) == ["gradient_norm"], "another norm than the one that was measured"


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_norm_that_the_script_changes_between_the_halves_is_the_one_that_is_clipped_by(
    clip: Any, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        if on:
            swap(optimizer, clip=clip)
        for number in range(2):  # the second time the limit is known
            optimizer.zero_grad()
            loss_of(model, number).backward()
            norm = clip_grad._get_total_norm([p.grad for p in model.parameters()])
            norm.mul_(2)  # as one that is summed over ranks in place
            clip_grad._clip_grads_with_norm_(model.parameters(), 1e-2, norm)
        ends.append(grads_of(model))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-5, atol=0)


def test_norms_that_the_script_keeps_stay_what_they_were(device: CpuDevice) -> None:
    model, optimizer = network_and_adamw()
    swap(optimizer)
    kept, then = [], []
    for number in range(3):
        model.zero_grad()
        loss_of(model, number).backward()
        kept.append(clip_grad_norm_(model.parameters(), 1.0))
        then.append(kept[-1].item())
    assert [norm.item() for norm in kept] == then
    assert len(set(then)) == 3


def test_an_update_counts_as_a_change_so_that_autograd_notices_a_stale_graph(device: CpuDevice) -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    swap(optimizer)
    loss = (weight * weight).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_torchs_functions_are_back_when_the_last_swap_is_gone(device: CpuDevice) -> None:
    before = (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)
    (_, one), (_, other) = network_and_adamw(), network_and_adamw()
    swap(one)
    swap(other)
    assert clip_grad._get_total_norm is not before[0]
    unswap(one)
    assert clip_grad._get_total_norm is not before[0]
    unswap(other)
    assert (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_) == before


def test_they_are_back_too_when_the_script_drops_its_optimizer(device: CpuDevice) -> None:
    before = clip_grad._get_total_norm
    swap(network_and_adamw()[1])
    gc.collect()
    assert clip_grad._get_total_norm is before


def test_an_empty_generator_warns_as_in_torch(device: CpuDevice) -> None:
    _, optimizer = network_and_adamw()
    swap(optimizer)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        assert clip_grad_norm_((p for p in ()), 1.0) == 0
    assert "empty generator" in str(given[0].message)


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_new_gradients_and_a_new_learning_rate_at_each_step_cost_no_launch(
    clip: Any, device: CpuDevice
) -> None:
    expected = {"exact": list(LAUNCHES), "deferred": ["gradient_norm", "adamw"]}[clip]
    model, optimizer = network_and_adamw()
    swap(optimizer, clip=clip)
    kept = []
    for number in range(3):
        kept.append([param.grad for param in model.parameters()])  # so that their addresses stay taken
        model.zero_grad()
        loss_of(model, number).backward()
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
        device.launched.clear()
        clip_grad_norm_(model.parameters(), 1e-2)
        optimizer.step()
        assert device.launched == expected


def test_two_threads_that_clip_gradients_of_the_same_shapes_do_not_mix_them_up(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between finding the table, telling it the addresses and the launch either may get its turn."""
    launch = device.launch

    def slowly(*names: str, **how: Any) -> None:
        time.sleep(0.002)
        launch(*names, **how)

    monkeypatch.setattr(device, "launch", slowly)
    norms: dict[int, list[float]] = {1: [], 2: []}

    def clips(size: int) -> None:
        param = nn.Parameter(torch.zeros(400))
        for _ in range(20):
            param.grad = torch.full((400,), float(size))
            norms[size].append(float(clip_grad_norm_([param], 1e3)))

    params = [nn.Parameter(torch.zeros(400))]
    held = swap(torch.optim.SGD(params, lr=1.0))
    threads = [threading.Thread(target=clips, args=(size,)) for size in norms]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held.clip == "exact"
    assert norms == {size: [pytest.approx(20.0 * size)] * 20 for size in norms}


def test_each_stream_has_tables_of_its_own_and_a_graph_takes_one_over(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued on two streams may run at the same time, and a table has one place for sums."""
    now = [0, False]
    monkeypatch.setattr(_gradients, "_stream_at", lambda place: tuple(now))
    tables = _gradients.GradientTables()
    grads = tables.look_at([torch.ones(30)])
    assert grads is not None
    first = tables._table(grads.kind)
    now[:] = [1, False]
    second = tables._table(grads.kind)
    assert second is not None and second is not first
    now[:] = [2, True]
    assert tables._table(grads.kind) in (first, second), "none can be made in a capture"
    assert tables._table(grads.kind) in (first, second)
    now[:] = [3, True]
    assert tables._table(grads.kind) is not None
    now[:] = [4, False]
    assert tables._table(grads.kind) not in (first, second, None)


def test_of_more_lists_in_turn_than_are_remembered_torch_clips_those_left_over(device: CpuDevice) -> None:
    """As where a script clips each parameter alone. Each new list waits for the device."""
    params = [nn.Parameter(torch.zeros(size)) for size in range(1, _gradients.TABLES + 5)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    swap(optimizer)
    for _ in range(3):
        device.launched.clear()
        for p in params:
            p.grad = torch.full_like(p, 3.0)
            assert float(clip_grad_norm_([p], 0.1)) == pytest.approx(3 * p.numel() ** 0.5)
            assert float(p.grad.norm()) == pytest.approx(0.1, rel=1e-4)
        assert device.launched == ["gradient_norm", "scale"] * _gradients.TABLES


def test_a_list_that_is_clipped_no_more_makes_room_for_another(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gradients, "FORGOTTEN_AFTER", 10)
    tables = _gradients.GradientTables()
    lists = [[torch.ones(size)] for size in range(1, _gradients.TABLES + 2)]
    assert all(tables.look_at(each) for each in lists[:-1])
    taken = [tables.look_at(lists[-1]) is not None for _ in range(5)]
    assert taken == [False, False, False, True, True]


@pytest.mark.parametrize("missing", ["norm", "scale"])
def test_clipping_goes_on_by_torch_where_a_kernel_does_not_compile(
    missing: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        loss_of(model, 0).backward()
        if on:
            swap(optimizer)
            without(missing, device, monkeypatch)
            with pytest.warns(RuntimeWarning, match="sm_61.\nTorch goes on clipping"):
                norm = clip_grad_norm_(model.parameters(), 1e-2)
        else:
            norm = clip_grad_norm_(model.parameters(), 1e-2)
        ends.append([norm, *grads_of(model)])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert launched(device) == []


@pytest.mark.parametrize("clip", ["exact", "deferred"])
@pytest.mark.parametrize("refused", ["norm", "scale"])
def test_clipping_goes_on_by_torch_where_a_launch_fails(
    refused: str, clip: Any, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and_adamw()
        if on:
            swap(optimizer, clip=clip)
            failing(refused, device, monkeypatch)
        for number in range(3):
            optimizer.zero_grad()
            loss_of(model, number).backward()
            fails = on and number == 0 and (refused, clip) != ("scale", "deferred")  # which launches none
            with (
                pytest.warns(RuntimeWarning, match="code 701.*\\nTorch goes on clipping")
                if fails
                else nullcontext()
            ):
                clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
        ends.append(list(model.parameters()))
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    assert launched(device).count("adamw") == 3
