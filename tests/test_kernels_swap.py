"""Kernels under live optimizers: what the script computes, and that nothing of the script's notices."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diagnose.kernels import _lineup
from diagnose.kernels._algorithms import Algorithm
from diagnose.kernels._stepper import nothing_due
from diagnose.kernels._swap import AMP, CannotSwap, StandIn, support, swap, swap_of, unswap
from torch import nn

from diagnose.actions._shadow import compare_update
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.core.job import Job
from tests.kernels_on_cpu import CpuDevice, failing, kernels_on_cpu, without

Make = Callable[[Any], torch.optim.Optimizer]

MAKERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam-amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "adam-maximize": lambda params: torch.optim.Adam(params, lr=1e-2, maximize=True, eps=0),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2),
    "sgd-nesterov": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "sgd-dampening": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5),
}
STATEFUL = [name for name in MAKERS if name != "sgd"]


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu() as device:
        yield device


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int, scale: float = 1.0) -> None:
    image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    (model(image).square().mean() * scale).backward()
    optimizer.step()


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Weights and all of the optimizer's state, as a checkpoint shows it."""
    state = optimizer.state_dict()["state"]
    held = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *held]]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    """Bit for bit."""
    assert len(ours) == len(theirs)
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(ours, theirs, strict=True))


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_swapped_it_trains_as_torch_does(name: str, device: CpuDevice) -> None:
    ends = []
    for on in (False, True):
        model = network()
        optimizer = MAKERS[name](model.parameters())
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
        model = network()
        optimizer = MAKERS[name](model.parameters())
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
    model = network()
    optimizer = MAKERS[name](model.parameters())
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
    model = network()
    optimizer = MAKERS[name](model.parameters())
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
        model = network()
        optimizer = MAKERS[name](model.parameters())
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
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
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
    model = network()
    optimizer = MAKERS[name](model.parameters())
    taken = swap(optimizer)
    model(torch.ones(4, 50)).square().mean().backward()
    with torch.device("meta"):
        optimizer.step()
    assert not taken.stepper.left
    assert {each.device.type for each in everything(model, optimizer)} == {"cpu"}


def test_two_schedulers_made_before_and_after_go_on_and_give_no_warning(device: CpuDevice) -> None:
    ends, rates = [], []
    for on in (False, True):
        model = network()
        optimizer = MAKERS["adamw"](model.parameters())
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


@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_gradient_scaler_skips_the_step_with_an_infinity(clip: Any, device: CpuDevice) -> None:
    """The scales are powers of two: without the skipped step the bits are those of training without one."""
    ends, counts = [], []
    for scaled in (False, True):
        model = network()
        optimizer = MAKERS["adamw"](model.parameters())
        swap(optimizer, clip=clip)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3, enabled=scaled)
        for number in range(7):
            if number == 4 and not scaled:
                continue
            optimizer.zero_grad()
            image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
            loss = scaler.scale(model(image).square().mean())
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
        model = network()
        optimizer = MAKERS[name](model.parameters())
        swap(optimizer, clip="deferred")
        optimizer.step()  # without gradients: from the next one on the scaler leaves skipping to the kernel
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for number in [9, 0, 1] if skipped else [0, 1]:
            optimizer.zero_grad()
            image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
            scaler.scale(model(image).square().mean()).backward()
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
            image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
            scaler.scale(model(image).square().mean()).backward()
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
        model = network()
        optimizer = MAKERS["adamw"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        if on and swapped_at == 0:
            swap(optimizer, clip=clip)
        wrapper = Accelerated(optimizer, scaler)
        for number in range(5):
            if on and number == swapped_at == 2:
                swap(optimizer, clip=clip)
            optimizer.zero_grad()
            image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
            scaler.scale(model(image).square().mean()).backward()
            if number == 3:
                model[2].bias.grad[0] = float("inf")
            wrapper.step()
        ends.append(everything(model, optimizer))
        skips.append(wrapper.skipped)
    assert skips[0] == skips[1] == [False, False, False, True, False]
    assert_close(ends[1], ends[0])


def test_a_closure_runs_with_gradients_once_and_its_loss_is_returned(device: CpuDevice) -> None:
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
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
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
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
        model = network()
        optimizer = MAKERS["adamw"](model.parameters())
        order: list[Any] = []
        optimizer.register_step_pre_hook(lambda *args, o=order: o.append(("pre", type(args[0]).__name__)))
        if on:
            swap(optimizer)
        optimizer.register_step_post_hook(lambda *args, o=order: o.append(("post", type(args[0]).__name__)))
        step(model, optimizer, 0)
        orders.append(order)
    assert orders[0] == orders[1] == [("pre", "AdamW"), ("post", "AdamW")]


def test_an_exception_in_anothers_hook_costs_that_step_alone(device: CpuDevice) -> None:
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
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
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
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
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
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
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
    swap(optimizer)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    model(torch.ones(1, 50)).sum().backward()
    compiled()
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


class MyAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: MyAdamW(p), "not for MyAdamW of"),
        (lambda p: torch.optim.RMSprop(p), "there are kernels for Adam, AdamW"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "it is differentiable"),
        (
            lambda p: torch.optim.Adam(p, betas=(torch.tensor(0.9), torch.tensor(0.99)), capturable=True),
            "a coefficient other than the learning rate is a tensor",
        ),
        (
            lambda p: torch.optim.SGD([nn.Parameter(q.detach().double()) for q in p], lr=0.1),
            "a parameter is of torch.float64",
        ),
        (lambda p: torch.optim.SGD([torch.zeros(4, 6)[:, ::2]], lr=0.1), "a parameter has gaps in memory"),
        (lambda p: torch.optim.SGD([nn.Parameter(torch.zeros(2).cfloat())], lr=0.1), "complex64"),
    ],
)
def test_what_no_kernel_can_do_is_refused_in_words(make: Make, reason: str, device: CpuDevice) -> None:
    optimizer = make([nn.Parameter(torch.zeros(2, 2))])
    assert any(reason in each for each in support(optimizer)), support(optimizer)
    with pytest.raises(CannotSwap, match=reason):
        swap(optimizer)
    assert not optimizer._optimizer_step_pre_hooks


def test_parameters_that_share_memory_are_refused(device: CpuDevice) -> None:
    flat = torch.zeros(10)
    optimizer = torch.optim.SGD([flat[:6], flat[5:]], lr=0.1)
    assert support(optimizer) == ["two parameters share memory"]


def test_a_second_swap_is_refused(device: CpuDevice) -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    swap(optimizer)
    with pytest.raises(CannotSwap, match="by kernels already"):
        swap(optimizer)


def test_on_a_cpu_it_says_why_not() -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    [reason] = support(optimizer)
    assert reason == "the parameters are on cpu, and the kernels are for CUDA; torch's own serve there"
    with pytest.raises(CannotSwap, match=r"AdamW: the parameters are on cpu.* goes on with torch's AdamW"):
        swap(optimizer)


def test_the_stand_in_passes_on_what_is_set_on_it(device: CpuDevice) -> None:
    optimizer = MAKERS["adamw"](network().parameters())
    stand_in = StandIn(optimizer, swap(optimizer).stepper, nothing_due)
    stand_in._need_device_dtype_check_for_fused = False
    assert vars(optimizer)["_need_device_dtype_check_for_fused"] is False


def test_the_tuners_action_uses_them_where_they_can_be_used(device: CpuDevice) -> None:
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
    step(model, optimizer, 0)
    action, job = FusedOptimizer(), Job(models=[model], optimizers=[optimizer])
    action.check(job)
    before = action.state(job)
    with action.apply(job, []):
        step(model, optimizer, 1)
        saved = optimizer.state_dict()
        assert saved["param_groups"][0]["fused"] is None
    action.verify_undone(job, before)
    assert "adamw" in device.launched
    launched = len(device.launched)
    step(model, optimizer, 2)
    assert len(device.launched) == launched


def test_the_tuners_numerics_check_sees_them_and_leaves_the_training_alone(device: CpuDevice) -> None:
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    action, job = FusedOptimizer(), Job(models=[model], optimizers=[optimizer])
    verdict = compare_update(job, action.apply(job, []), action.safety)
    assert verdict.ok, verdict.reason
    assert device.launched.count("adamw") == 1
    assert_equal(everything(model, optimizer), before)


@pytest.mark.parametrize("refused", ["adamw", "norm"])
def test_the_action_must_not_stay_where_kernels_have_failed_as_other_ranks_may_still_use_them(
    refused: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    optimizer = MAKERS["adamw"](model.parameters())
    step(model, optimizer, 0)
    action, job = FusedOptimizer(), Job(models=[model], optimizers=[optimizer])
    with action.prepare(job, None) as prepared, action.apply(job, prepared):
        step(model, optimizer, 1)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
        assert action.why_not_stay(prepared) == ""
        failing(refused, device, monkeypatch)
        with pytest.warns(RuntimeWarning, match="code 701"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
        assert "code 701" in action.why_not_stay(prepared)


def test_the_action_leaves_to_torch_what_kernels_cannot_do(device: CpuDevice) -> None:
    model = network().double()
    optimizer = MAKERS["adamw"](model.parameters())
    with FusedOptimizer().apply(Job(models=[model], optimizers=[optimizer]), []):
        assert swap_of(optimizer) is None
        model(torch.ones(1, 50, dtype=torch.float64)).sum().backward()
        optimizer.step()
    assert device.launched == []


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


def test_an_unknown_allowance_is_a_mistake_of_the_caller(device: CpuDevice) -> None:
    with pytest.raises(ValueError, match="unknown in allow: magic; known: stochastic-rounding"):
        swap(MAKERS["sgd"](network().parameters()), allow=("magic",))


def test_a_parameter_given_twice_is_refused(device: CpuDevice) -> None:
    weight = nn.Parameter(torch.ones(3))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([weight, weight], lr=0.1)
    assert support(optimizer) == ["two parameters share memory"]


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("clip", ["exact", "deferred"])
def test_a_kernel_that_does_not_compile_hands_the_step_to_torch_and_says_so_once(
    clip: Any, name: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the first step, where deferred clipping has left the gradients as they were."""
    ends = []
    for on in (False, True):
        model = network()
        optimizer = MAKERS[name](model.parameters())
        if on:
            taken = swap(optimizer, clip=clip)
            without("sgd" if name.startswith("sgd") else "adamw", device, monkeypatch)
        for number in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 50), number + 1.0)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            expected = r"no image for sm_61.\nTraining goes on with torch's (AdamW|Adam|SGD)\."
            with pytest.warns(RuntimeWarning, match=expected) if on and number == 0 else nullcontext():
                optimizer.step()
            if on:
                assert "sm_61" in taken.stepper.left[0]
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert not {"adamw", "sgd"} & set(device.launched)


@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize("clip", ["exact", "deferred"])
@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_a_launch_that_fails_hands_its_step_to_torch_and_says_so_once(
    name: str, clip: Any, after: int, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = []
    for on in (False, True):
        model = network()
        optimizer = MAKERS[name](model.parameters())
        if on:
            swap(optimizer, clip=clip)
            failing(name.partition("-")[0], device, monkeypatch, after=after)
        for number in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 50), number + 1.0)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            fails = on and number == after
            with pytest.warns(RuntimeWarning, match="code 701") if fails else nullcontext():
                optimizer.step()
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


@pytest.mark.parametrize("short", ["tables", "states"])
@pytest.mark.parametrize("name", ["adamw", "sgd-dampening"])
def test_where_memory_is_too_short_for_kernels_torch_goes_on_in_a_whole_state(
    name: str, short: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: Any) -> Any:
        raise torch.OutOfMemoryError("out of memory")

    def one_left(*_: Any) -> torch.Tensor:
        return room.pop() if room else none_left()

    room = [torch.zeros(60, 50)]
    ends = []
    for on in (False, True):
        model = network()
        optimizer = MAKERS[name](model.parameters())
        if on:
            swap(optimizer)
            if short == "tables":
                monkeypatch.setattr(_lineup, "Table", none_left)
            else:
                monkeypatch.setattr(Algorithm, "make", one_left)
        with pytest.warns(RuntimeWarning, match="out of memory") if on else nullcontext():
            step(model, optimizer, 0)
        step(model, optimizer, 1)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert device.launched == []


def test_a_variant_that_does_not_compile_later_costs_no_step_and_no_state(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A parameter in 16 bits joins, for which another variant is needed."""
    ends = []
    for on in (False, True):
        model = network()
        optimizer = MAKERS["adamw"](model.parameters())
        if on:
            swap(optimizer)
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        if on:
            without("adamw", device, monkeypatch)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
        optimizer.param_groups[1]["params"][0].grad = torch.ones(5)
        with pytest.warns(RuntimeWarning, match="no image") if on else nullcontext():
            step_without_zeroing(model, optimizer)
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])
    assert {float(each["step"]) for each in optimizer.state_dict()["state"].values()} == {1.0, 3.0}


def step_without_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(4, 50)).square().mean().backward()
    optimizer.step()
