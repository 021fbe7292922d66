"""What is easily overlooked about a swapped optimizer: two devices, real DDP, averages, others' states."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diagnose.kernels import _stepper
from diagnose.kernels._lineup import Member, by_device
from diagnose.kernels._swap import support, swap, unswap
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.kernels_on_cpu import (
    CPU,
    MAKERS,
    CpuDevice,
    assert_close,
    assert_equal,
    everything,
    failing,
    loss_of,
    network,
    network_and,
    step,
)

pytest_plugins = ("tests.group_of_one", "tests.kernels_on_cpu")


# -- several devices


@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_parameters_on_two_devices_are_stepped_by_a_launch_on_each(
    name: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on `cpu:0` is on `cpu`, so that the second device is one by order alone."""

    def in_turn(members: list[Member]) -> dict[torch.device, list[Member]]:
        return {torch.device("cpu", 0): members[::2], CPU: members[1::2]}

    monkeypatch.setattr(_stepper, "by_device", in_turn)
    ends = []
    for on in (False, True):
        model = network()
        optimizer = MAKERS[name]([{"params": [p], "lr": 0.01 * (1 + p.dim())} for p in model.parameters()])
        taken = swap(optimizer) if on else None
        for number in range(6):
            if number == 3:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            loss_of(model, number).backward()
            if number in (1, 4):
                model[number // 2].weight.grad = None
            optimizer.step()
        assert taken is None or taken.stepper.left == []
        ends.append(everything(model, optimizer))
        unswap(optimizer)
    assert_close(ends[1], ends[0])
    assert device.launched == [name.partition("-")[0]] * 12


@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_a_launch_that_fails_on_the_second_device_leaves_torch_what_the_first_has_not_stepped(
    name: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_turn(members: list[Member]) -> dict[torch.device, list[Member]]:
        return {torch.device("cpu", 0): members[::2], CPU: members[1::2]}

    monkeypatch.setattr(_stepper, "by_device", in_turn)
    failing(name.partition("-")[0], device, monkeypatch, after=3)
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        if on:
            swap(optimizer)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 50), number + 1.0)).square().mean().backward()
            with pytest.warns(RuntimeWarning, match="code 701") if on and number == 1 else nullcontext():
                optimizer.step()
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


def test_parameters_are_told_apart_by_the_device_they_are_on(device: CpuDevice) -> None:
    tensors = [torch.zeros(3), torch.zeros(3, device="meta"), torch.zeros(2)]
    members: Any = [SimpleNamespace(param=tensor) for tensor in tensors]
    assert by_device(members) == {CPU: [members[0], members[2]], torch.device("meta"): [members[1]]}


def test_a_device_that_has_no_kernels_keeps_the_whole_optimizer_torchs(device: CpuDevice) -> None:
    params = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3, device="meta"))]
    [reason] = support(torch.optim.AdamW(params))
    assert reason.startswith("the parameters are on meta, and the kernels are for CUDA")


# -- parameters that share memory


def test_a_tied_weight_is_one_parameter_and_stepped_once(device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(50, 50), nn.Tanh(), nn.Linear(50, 50))
        model[2].weight = model[0].weight
        optimizer = MAKERS["adamw"](model.parameters())
        if on:
            assert swap(optimizer).stepper.left == []
        for number in range(3):
            step(model, optimizer, number)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert device.launched == ["adamw"] * 3


def shared(kind: str) -> torch.optim.Optimizer:
    """Two groups that update the same memory."""
    weight = nn.Parameter(torch.ones(40))
    again = nn.Parameter(weight.data) if kind == "the same memory" else weight
    groups = [{"params": [weight]}, {"params": [nn.Parameter(torch.ones(3))]}]
    optimizer = torch.optim.SGD(groups, lr=0.25, momentum=0.5, dampening=0.5)
    if kind == "the same memory":
        optimizer.add_param_group({"params": [again]})
    else:  # torch refuses to add it, and does not see what is put into a group's list
        optimizer.param_groups[1]["params"].append(again)
    return optimizer


@pytest.mark.parametrize("kind", ["the same memory", "the same parameter"])
def test_a_parameter_in_two_groups_is_refused(kind: str, device: CpuDevice) -> None:
    assert support(shared(kind)) == ["two parameters share memory"]


@pytest.mark.parametrize("kind", ["the same memory", "the same parameter"])
def test_a_parameter_that_a_second_group_takes_later_is_left_to_torch(kind: str, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        optimizer = shared(kind)
        groups = optimizer.param_groups[:]
        taken_back = groups.pop() if kind == "the same memory" else groups[1]["params"].pop()
        optimizer.param_groups[:] = groups
        taken = swap(optimizer) if on else None
        for number in range(3):
            if number == 1 and kind == "the same memory":
                optimizer.param_groups.append(taken_back)
            elif number == 1:
                optimizer.param_groups[1]["params"].append(taken_back)
            params = [p for group in optimizer.param_groups for p in group["params"]]
            for p in params:
                p.grad = torch.full_like(p, 2.0)
            optimizer.step()
        assert taken is None or taken.stepper.left == ["two parameters share memory"]
        ends.append([p.detach().clone() for p in params])
    assert_equal(ends[1], ends[0])
    assert device.launched == ["sgd"]


# -- gradients of another type than their parameters


def given(params: list[nn.Parameter], dtype: torch.dtype, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for p in params:
        value = torch.randn(p.shape, generator=generator).bfloat16()
        p.grad_dtype = dtype
        p.grad = value.to(dtype)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no such gradients")
@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov"])
def test_gradients_in_bf16_of_fp32_parameters_update_as_the_same_numbers_in_fp32(
    name: str, device: CpuDevice
) -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(size)) for size in (3, 2500, 17)]
        optimizer = MAKERS[name](params)
        taken = swap(optimizer)
        for number in range(3):
            given(params, dtype, number)
            optimizer.step()
        assert taken.stepper.left == []
        states = [state[key] for state in optimizer.state.values() for key in state]
        assert {state.dtype for state in states} == {torch.float32}
        ends.append([tensor.detach().clone() for tensor in [*params, *states]])
        unswap(optimizer)
    assert_equal(ends[1], ends[0])


# -- wrappers


@pytest.mark.parametrize("clip", ["exact", "deferred"])
@pytest.mark.parametrize("how", ["negative", "turned", "expanded"])
def test_a_gradient_that_changes_what_it_is_where_it_lies_is_seen(
    how: str, clip: Any, device: CpuDevice
) -> None:
    """The address stays, and so would the object: only a look at the whole of it tells."""
    ends = []
    for on in (False, True):
        weight = nn.Parameter(torch.ones(5, 5))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        if on:
            swap(optimizer, clip=clip)
        grad = torch.empty(5, 5)
        for number in range(4):
            weight.grad = grad.copy_(torch.arange(25.0).reshape(5, 5))
            if number == 2:
                if how == "turned":
                    grad.t_()
                else:
                    weight.grad = torch._neg_view(grad) if how == "negative" else grad[:1].expand(5, 5)
            if number != 2 or how == "turned":  # torch clips none of the others
                clip_grad_norm_([weight], 20.0)
            optimizer.step()
        ends.append([weight.detach().clone()])
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_in_the_buckets_of_ddp_are_clipped_and_stepped_where_they_lie(
    keeps: bool, group_of_one: None, device: CpuDevice
) -> None:
    from torch.nn.parallel import DistributedDataParallel

    ends = []
    for on in (False, True):
        model = DistributedDataParallel(network(), gradient_as_bucket_view=True)
        optimizer = MAKERS["adamw"](model.parameters())
        taken = swap(optimizer) if on else None
        for number in range(4):
            optimizer.zero_grad(set_to_none=not keeps)
            for micro in range(2):
                with model.no_sync() if micro == 0 else torch.enable_grad():
                    loss_of(model, 2 * number + micro).backward()
            clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert len({grad.untyped_storage().data_ptr() for grad in grads}) == 1, "views of one bucket"
        assert taken is None or taken.stepper.left == []
        ends.append([*everything(model, optimizer), *[grad.clone() for grad in grads]])
        unswap(optimizer)
    assert_close(ends[1], ends[0])
    assert device.launched == ["gradient_norm", "scale", "adamw"] * 4


def test_an_average_of_the_parameters_follows_them(device: CpuDevice) -> None:
    """It reads them after each step, and in between they are exchanged for it, as for an evaluation."""
    ends = []
    for on in (False, True):
        model = network()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = MAKERS["adamw"](model.parameters())
        if on:
            swap(optimizer)
        for number in range(5):
            step(model, optimizer, number)
            average.update_parameters(model)
            for _ in range(2 if number == 2 else 0):
                for p, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
                    p.data, averaged.data = averaged.data, p.data
        ends.append([*everything(model, optimizer), *(p.detach().clone() for p in average.parameters())])
    assert_close(ends[1], ends[0])
    assert device.launched == ["adamw"] * 5


# -- states that others have written


def trained(options: dict[str, Any], state: Any, *, on: bool, steps: int = 3) -> list[Any]:
    """A model, its optimizer with these options, and what it was saved as; from such a state, if any."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    if on:
        swap(optimizer)
    if state is not None:
        model.load_state_dict(state[0])
        # A script that asks for another implementation than it had asks for it after loading, too.
        optimizer.load_state_dict(copy.deepcopy(state[1]))
        for group in optimizer.param_groups:
            group.update(options)
    for number in range(steps):
        step(model, optimizer, number)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return [saved, everything(model, optimizer)]


FUSED = {"fused": True, "foreach": None}
FOREACH = {"fused": None, "foreach": True}


@pytest.mark.parametrize("swapped", [(True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("before, after", [(FUSED, FOREACH), (FOREACH, FUSED)], ids=["fused", "foreach"])
def test_training_goes_on_with_another_implementation_of_torchs(
    before: dict[str, Any], after: dict[str, Any], swapped: tuple[bool, bool], device: CpuDevice
) -> None:
    theirs, _ = trained(before, None, on=False)
    ours, _ = trained(before, None, on=swapped[0])
    for mine, own in zip(ours[1]["state"].values(), theirs[1]["state"].values(), strict=True):
        assert {key: (t.dtype, t.shape, t.device) for key, t in mine.items()} == {
            key: (t.dtype, t.shape, t.device) for key, t in own.items()
        }
    (_, end), (_, expected) = trained(after, ours, on=swapped[1]), trained(after, theirs, on=False)
    assert_close(end, expected)
    assert "adamw" in device.launched


@pytest.mark.parametrize("options", [FUSED, FOREACH], ids=["fused", "foreach"])
def test_counts_of_steps_with_a_dimension_are_taken(options: dict[str, Any], device: CpuDevice) -> None:
    """FSDP has saved them so."""
    saved, _ = trained(options, None, on=False)
    for state in saved[1]["state"].values():
        state["step"] = state["step"].reshape(1)
    (_, end), (_, expected) = (trained(options, saved, on=on) for on in (True, False))
    assert_close([t.squeeze() for t in end], [t.squeeze() for t in expected])
    assert "adamw" in device.launched


# -- checks of torch's own


def test_what_torch_refuses_before_a_step_it_refuses_with_kernels_too(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a capture in a CUDA graph by an optimizer that is not `capturable`."""
    model, optimizer = network_and("adamw")
    swap(optimizer)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    asked: list[Any] = []

    def refuse(asking: torch.optim.Optimizer) -> None:
        asked.append(asking)
        raise RuntimeError("Attempting CUDA graph capture of step()")

    check: Callable[..., None] = refuse
    with monkeypatch.context() as capturing:
        capturing.setattr(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", check)
        with pytest.raises(RuntimeError, match="Attempting CUDA graph capture"):
            optimizer.step()
    assert asked == [optimizer], "it is asked for its own groups, not for a stand-in's"
    assert_equal(everything(model, optimizer), before)
    assert device.launched == ["adamw"]
