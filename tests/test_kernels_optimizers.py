"""Our own optimizers: with kernels they do what their plain implementation does, or torch's."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import diagnose.kernels
import pytest
import torch
from diagnose.kernels import _optimizers as ours
from diagnose.kernels._driver import DriverError
from diagnose.kernels._swap import swap_of
from torch import nn

from tests.kernels_on_cpu import (
    CpuDevice,
    assert_close,
    assert_equal,
    everything,
    failing,
    kernels_on_cpu,
    loss_of,
    network,
    step,
)

pytest_plugins = ("tests.kernels_on_cpu",)

Make = Callable[[Any], torch.optim.Optimizer]

AS_TORCH: dict[str, tuple[Make, Make]] = {
    "adam": (lambda p: ours.Adam(p, 1e-2, amsgrad=True), lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True)),
    "adamw": (lambda p: ours.AdamW(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "sgd": (
        lambda p: ours.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    ),
}

PLAIN: dict[str, Make] = {
    "lion": lambda p: ours.Lion(p, lr=1e-2, weight_decay=0.1),
    "lion-maximize": lambda p: ours.Lion(p, lr=1e-2, maximize=True),
    "lamb": lambda p: ours.Lamb(p, lr=1e-2, max_grad_norm=0.1),
    "lamb-plain": lambda p: ours.Lamb(
        p, lr=1e-5, weight_decay=0.0, bias_correction=False, grad_averaging=False, max_grad_norm=0.0
    ),
    "lamb-nv": lambda p: ours.Lamb(p, lr=1e-2, weight_decay=0.0, use_nvlamb=True),
}


def trained(make: Make, steps: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = make(model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


@pytest.mark.parametrize("name", AS_TORCH)
@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_class_named_as_torchs_trains_as_torchs(name: str, on_cpu: bool) -> None:
    mine, theirs = AS_TORCH[name]
    with nullcontext() if on_cpu else kernels_on_cpu() as device:
        got = everything(*trained(mine))
    expected = everything(*trained(theirs))
    if on_cpu:
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), "it is torch that steps"
    else:
        assert device is not None and device.launched
        assert_close(got, expected)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_signatures_and_defaults_are_torchs(name: str) -> None:
    mine, theirs = getattr(ours, name), getattr(torch.optim, name)
    *as_torchs, clip, allow = inspect.signature(mine).parameters.values()
    assert as_torchs == list(inspect.signature(theirs).parameters.values())
    assert [(each.name, each.kind.description) for each in (clip, allow)] == [
        ("clip", "keyword-only"),
        ("allow", "keyword-only"),
    ]
    assert mine([torch.zeros(2)], lr=0.1).defaults == theirs([torch.zeros(2)], lr=0.1).defaults


@pytest.mark.parametrize("name", PLAIN)
def test_kernels_train_as_the_plain_implementation_does(name: str) -> None:
    plain = everything(*trained(PLAIN[name]))
    with kernels_on_cpu() as device:
        assert_close(everything(*trained(PLAIN[name])), plain)
    assert len([entry for entry in device.launched if entry != "patch"]) in (5, 10, 15)


@pytest.mark.parametrize("name", PLAIN)
def test_a_checkpoint_goes_from_one_to_the_other_bit_for_bit(name: str) -> None:
    with kernels_on_cpu():
        model, optimizer = trained(PLAIN[name])
        before = everything(model, optimizer)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    other = network()
    resumed = PLAIN[name](other.parameters())
    other.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    assert_equal(everything(other, resumed), before)
    step(other, resumed, 7)


def test_lion_moves_by_the_sign_and_decays_apart() -> None:
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = ours.Lion([weight], lr=0.1, betas=(0.5, 0.8), weight_decay=0.5)
    weight.grad = torch.tensor([2.0, -1.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.tensor([0.85, -1.8, 2.85]))
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.tensor([0.4, -0.2, 0.0]))


def test_lamb_scales_each_update_to_the_norm_of_its_parameter() -> None:
    """After one step from zero the update before scaling is the sign of the gradient."""
    weight = nn.Parameter(torch.tensor([3.0, 4.0]))
    optimizer = ours.Lamb([weight], lr=0.1, eps=0.0, weight_decay=0.0, use_nvlamb=True)
    weight.grad = torch.tensor([2.0, -7.0])
    optimizer.step()
    torch.testing.assert_close(
        weight.detach(), torch.tensor([3.0, 4.0]) + torch.tensor([-0.5, 0.5]) / 2**0.5
    )


def test_copies_and_pickles_are_stepped_by_kernels_again(device: CpuDevice) -> None:
    _, optimizer = trained(AS_TORCH["adamw"][0], steps=2)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert swap_of(twin) is not None
        for p in twin.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        launched = device.launched.count("adamw")
        twin.step()
        assert device.launched.count("adamw") == launched + 1
        assert {state["step"].item() for state in twin.state.values()} == {3.0}
    assert {state["step"].item() for state in optimizer.state.values()} == {2.0}


def test_one_hook_is_enough_after_a_checkpoint_is_loaded(device: CpuDevice) -> None:
    model, optimizer = trained(AS_TORCH["adamw"][0], steps=1)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    step(model, optimizer, 1)
    assert device.launched.count("adamw") == 2


@pytest.mark.parametrize("name", ["lion", "lamb"])
def test_a_closure_is_evaluated_with_gradients(name: str, device: CpuDevice) -> None:
    model = network()
    optimizer = PLAIN[name](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 50)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    assert first is not None and first.requires_grad
    assert not torch.equal(first, optimizer.step(closure))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: ours.Lion(p, lr=-1.0), "lr is -1.0; it must not be negative"),
        (
            lambda p: ours.Lamb(p, betas=(0.9, 1.0)),
            r"betas are \(0.9, 1.0\); each must be",
        ),
        (lambda p: ours.Lamb(p, eps=float("nan")), "eps is nan"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([torch.zeros(2)])


def test_a_subclass_of_the_scripts_is_left_to_its_own_step(device: CpuDevice) -> None:
    class Theirs(ours.AdamW):
        pass

    trained(lambda params: Theirs(params, lr=1e-2), steps=1)
    assert device.launched == []


def test_info_says_what_there_is_and_compiles_nothing() -> None:
    text = str(diagnose.kernels.info())
    assert text.startswith("compiler: ")
    assert "cache: " in text
    assert torch.cuda.is_available() or text.endswith("no CUDA device: torch's own optimizers are used")


def test_the_package_gives_away_what_it_promises() -> None:
    promised = (
        "Adam",
        "AdamW",
        "AdamW8bit",
        "MasterAdamW",
        "SGD",
        "Lion",
        "Lamb",
        "swap",
        "unswap",
        "support",
        "info",
        "CannotSwap",
        "clip_grad_norm_",
    )
    assert all(callable(getattr(diagnose.kernels, name)) for name in promised)
    assert set(promised) <= set(dir(diagnose.kernels))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = diagnose.kernels.nonsense


def test_lambs_clipping_ends_where_all_gradients_together_are_small(device: CpuDevice) -> None:
    ends = []
    for factor in (1.0, 1e-3):
        torch.manual_seed(0)
        weights = [nn.Parameter(torch.randn(40)), nn.Parameter(torch.randn(50, 50))]
        optimizer = ours.Lamb(weights, lr=0.1, max_grad_norm=1.0, eps=1e-3)
        for weight in weights:
            weight.grad = torch.randn(weight.shape) * factor
        before = [weight.grad.clone() for weight in weights if weight.grad is not None]
        optimizer.step()
        ends.append(optimizer.state[weights[0]]["exp_avg"].norm())
        assert all(torch.equal(a, w.grad) for a, w in zip(before, weights, strict=True)), "not in memory"
    assert ends[0] < 0.1, "clipped to 1 altogether, of which this parameter has an eighth"
    assert ends[1] < 1e-3 * 7


@pytest.mark.parametrize("unscaled", [False, True])
def test_lambs_clipping_is_of_gradients_without_their_scale(device: CpuDevice, unscaled: bool) -> None:
    ends = []
    for clip in ("off", "deferred"):
        model = network()
        optimizer = ours.Lamb(model.parameters(), lr=1e-2, max_grad_norm=0.1, clip=clip)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, number)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        ends.append(everything(model, optimizer))
    assert_close(ends[1], ends[0])


class OwnLamb(ours.Lamb):
    pass


@pytest.mark.parametrize("kind", [OwnLamb, ours.Lamb])
def test_lamb_clips_where_no_kernels_are_under_it(device: CpuDevice, kind: type[ours.Lamb]) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        optimizer = kind(params, lr=1e-2, max_grad_norm=0.1)
        diagnose.kernels.unswap(optimizer)
        assert swap_of(optimizer) is None
        return optimizer

    assert_close(everything(*trained(make)), everything(*trained(PLAIN["lamb"])))


def test_a_step_of_lamb_whose_second_launch_fails_is_not_made_twice(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its moments have changed by then: the plain implementation would change them again."""
    model, optimizer = trained(lambda params: ours.Lamb(params, lr=1e-2), steps=2)
    failing("lamb", device, monkeypatch, after=1)
    with pytest.raises(DriverError, match="code 701"):
        step(model, optimizer, 2)
    assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    with pytest.warns(RuntimeWarning, match="code 701"):
        step(model, optimizer, 3)  # its first: the plain implementation makes all of it
    assert {float(state["step"]) for state in optimizer.state.values()} == {3.0}
