"""Kernels under live optimizers: what the script computes, and that nothing of the script's notices."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from diagnose.kernels._stepper import nothing_due
from diagnose.kernels._swap import StandIn, swap, swap_of, unswap

from tests.kernels_on_cpu import (
    MAKERS,
    STATEFUL,
    CpuDevice,
    assert_close,
    assert_equal,
    everything,
    network,
    network_and,
    step,
)

pytest_plugins = ("tests.kernels_on_cpu",)


@pytest.mark.parametrize("name", MAKERS)
def test_swapped_it_trains_as_torch_does(name: str, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        taken = swap(optimizer) if on else None
        for number in range(5):
            step(model, optimizer, number)
        assert taken is None or taken.stepper.left == []
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert device.launched.count(device.launched[-1]) == 5, "one launch updates all parameters"


@pytest.mark.parametrize("name", MAKERS)
def test_swapping_in_and_out_at_any_step_trains_as_torch_does(name: str, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model, optimizer = network_and(name)
        for number in range(8):
            if on and number in (2, 5):
                swap(optimizer)
            if on and number in (3, 7):
                unswap(optimizer)
            step(model, optimizer, number)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpoint_written_while_swapped_is_what_torch_would_go_on_from(
    name: str, device: CpuDevice
) -> None:
    model, optimizer = network_and(name)
    swap(optimizer)
    for number in range(3):
        step(model, optimizer, number)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loaded = torch.load(io.BytesIO(file.getvalue()))
    plain = network()
    plain.load_state_dict(loaded["model"])
    resumed = MAKERS[name](plain.parameters())
    resumed.load_state_dict(loaded["optimizer"])
    unswap(optimizer)
    assert_equal(everything(plain, resumed), everything(model, optimizer))
    for number in range(3, 6):
        step(model, optimizer, number)
        step(plain, resumed, number)
    assert_equal(everything(plain, resumed), everything(model, optimizer))


@pytest.mark.parametrize("name", STATEFUL)
def test_a_checkpoint_of_torchs_is_gone_on_from_while_swapped(name: str, device: CpuDevice) -> None:
    model, optimizer = network_and(name)
    for number in range(3):
        step(model, optimizer, number)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = network()
    resumed = MAKERS[name](other.parameters())
    swap(resumed)
    step(other, resumed, 99)
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    swap(optimizer)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(other, resumed, number)
    assert_equal(everything(other, resumed), everything(model, optimizer))


@pytest.mark.parametrize("name", STATEFUL)
def test_the_state_has_the_keys_types_and_devices_of_torchs(name: str, device: CpuDevice) -> None:
    shapes = []
    for on in (False, True):
        model, optimizer = network_and(name)
        if on:
            swap(optimizer)
        step(model, optimizer, 0)
        saved = optimizer.state_dict()
        shapes.append(
            {
                index: {key: (value.dtype, value.shape, value.device) for key, value in each.items()}
                for index, each in saved["state"].items()
            }
        )
        assert all(
            value.untyped_storage().nbytes() == value.nbytes
            for each in saved["state"].values()
            for value in each.values()
        ), "no tensor drags another along into the file"
    assert shapes[0] == shapes[1]


def test_whoever_reads_the_count_of_steps_sees_it_grow(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)
    seen = []
    for number in range(3):
        step(model, optimizer, number)
        seen.append({state["step"].item() for state in optimizer.state.values()})
    assert seen == [{1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov"])
def test_a_default_device_that_the_script_has_set_holds_no_count_of_steps(
    name: str, device: CpuDevice
) -> None:
    model, optimizer = network_and(name)
    taken = swap(optimizer)
    model(torch.ones(4, 50)).square().mean().backward()
    with torch.device("meta"):
        optimizer.step()
    assert not taken.stepper.left
    assert {each.device.type for each in everything(model, optimizer)} == {"cpu"}


def test_two_schedulers_made_before_and_after_go_on_and_give_no_warning(device: CpuDevice) -> None:
    ends, rates = [], []
    for on in (False, True):
        model, optimizer = network_and("adamw")
        first = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            if on:
                swap(optimizer)
            second = torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2),
                    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                ],
                milestones=[3],
            )
            for number in range(6):
                step(model, optimizer, number)
                first.step()
                second.step()
                if on and number == 3:
                    unswap(optimizer)
        rates.append((first.get_last_lr(), second.get_last_lr(), optimizer.param_groups[0]["lr"]))
        ends.append(everything(model, optimizer))
    assert rates[0] == rates[1]
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_that_is_a_tensor_is_read_at_each_step(
    dtype: torch.dtype, device: CpuDevice
) -> None:
    ends = []
    for on in (False, True):
        model = network()
        rate = torch.tensor(1e-2, dtype=dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
        if on:
            swap(optimizer)
        for number in range(4):
            step(model, optimizer, number)
            rate.mul_(0.5)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


def test_a_closure_runs_with_gradients_once_and_its_loss_is_returned(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)
    seen = []

    def closure() -> torch.Tensor:
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.ones(2, 50)).square().mean()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        loss = optimizer.step(closure)
    assert (seen, loss.requires_grad) == ([True], True)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_closure_that_raises_leaves_all_as_it_was(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)
    step(model, optimizer, 0)
    before = everything(model, optimizer)

    def closure() -> torch.Tensor:
        raise KeyError("the script's")

    with pytest.raises(KeyError, match="the script's"):
        optimizer.step(closure)
    assert_equal(everything(model, optimizer), before)
    step(model, optimizer, 1)
    assert swap_of(optimizer) is not None


def test_hooks_of_others_run_in_their_order_and_get_the_real_optimizer(device: CpuDevice) -> None:
    orders = []
    for on in (False, True):
        model, optimizer = network_and("adamw")
        order: list[Any] = []
        optimizer.register_step_pre_hook(lambda *args, o=order: o.append(("pre", type(args[0]).__name__)))
        if on:
            swap(optimizer)
        optimizer.register_step_post_hook(lambda *args, o=order: o.append(("post", type(args[0]).__name__)))
        step(model, optimizer, 0)
        orders.append(order)
    assert orders[0] == orders[1] == [("pre", "AdamW"), ("post", "AdamW")]


def test_an_exception_in_anothers_hook_costs_that_step_alone(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)

    def raising(*_: Any) -> None:
        raise KeyError("another's")

    handle = optimizer.register_step_pre_hook(raising)
    with pytest.raises(KeyError):
        step(model, optimizer, 0)
    handle.remove()
    step(model, optimizer, 0)
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


def test_copies_and_pickles_are_plain_optimizers_of_torchs(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)
    step(model, optimizer, 0)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert swap_of(twin) is None and "__getstate__" not in vars(twin)
        counts = [state["step"] for state in twin.state.values()]
        assert all(count.untyped_storage().nbytes() == 4 for count in counts), "each its own, as torch's"
        for p in twin.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        launched = len(device.launched)
        twin.step()
        assert len(device.launched) == launched
        assert {state["step"].item() for state in twin.state.values()} == {2.0}
    assert {state["step"].item() for state in optimizer.state.values()} == {1.0}


def test_it_leaves_no_trace(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    before = {key: value for key, value in vars(optimizer).items() if key != "state"}
    before = copy.copy(before)
    swap(optimizer, clip="deferred")
    step(model, optimizer, 0)
    unswap(optimizer)
    after = {key: value for key, value in vars(optimizer).items() if key != "state"}
    assert after == before
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_state_dict_post_hooks
    steps = [state["step"] for state in optimizer.state.values()]
    assert all(count.untyped_storage().nbytes() == 4 for count in steps), "each its own again"
    unswap(optimizer)


def test_a_step_that_the_script_compiles_is_left_to_torch(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
    swap(optimizer)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    model(torch.ones(1, 50)).sum().backward()
    compiled()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_the_stand_in_passes_on_what_is_set_on_it(device: CpuDevice) -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    stand_in = StandIn(optimizer, swap(optimizer).stepper, nothing_due)
    stand_in._need_device_dtype_check_for_fused = False
    assert vars(optimizer)["_need_device_dtype_check_for_fused"] is False
