"""Our own optimizers: with kernels they do what their plain implementation does, or torch's."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import diagnose.kernels
import pytest
import torch
from diagnose.kernels import _optimizers as ours
from diagnose.kernels._driver import DriverError
from diagnose.kernels._optimizer_8bit import AdamW8bit
from diagnose.kernels._swap import swap_of
from torch import nn

from tests.kernels_on_cpu import CpuDevice, failing, kernels_on_cpu

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


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu() as device:
        yield device


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 3))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(image).square().mean().backward()
    optimizer.step()


def trained(make: Make, steps: int = 5) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network()
    optimizer = make(model.parameters())
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    held = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in [*model.parameters(), *held]]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


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
    assert all(torch.equal(a, b) for a, b in zip(everything(other, resumed), before, strict=True))
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
            image = torch.randn(4, 50, generator=torch.Generator().manual_seed(number))
            optimizer.zero_grad()
            scaler.scale(model(image).square().mean()).backward()
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


def eight_bits(params: Any) -> torch.optim.Optimizer:
    return AdamW8bit(params, lr=1e-2)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_moments_of_one_byte_train_nearly_as_adamw(on_cpu: bool) -> None:
    """Within a tenth of the way that AdamW has gone; the first step, from moments of zero, is AdamW's."""
    for steps, share in ((1, 1e-4), (8, 0.1)):
        with nullcontext() if on_cpu else kernels_on_cpu():
            mine = list(trained(eight_bits, steps)[0].parameters())
        theirs = list(trained(lambda p: torch.optim.AdamW(p, lr=1e-2), steps)[0].parameters())
        for got, expected, start in zip(mine, theirs, network().parameters(), strict=True):
            assert (got - expected).norm() < share * (expected - start).norm()


def test_moments_of_one_byte_take_two_bytes_for_a_parameter_and_little_more(device: CpuDevice) -> None:
    weight = nn.Parameter(torch.randn(64, 256))
    optimizer = eight_bits([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    held = sum(value.nbytes for value in optimizer.state[weight].values())
    assert held <= weight.numel() * (2 + 8 / 256) + 4


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_of_one_byte_moments_is_adamws_and_loading_it_changes_no_code(
    dtype: torch.dtype, on_cpu: bool
) -> None:
    def make() -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
        torch.manual_seed(0)
        shape = (4, 30, 3, 3)
        first = torch.randn(shape, dtype=dtype).to(memory_format=torch.channels_last)
        params = [nn.Parameter(first), nn.Parameter(torch.randn(7, dtype=dtype))]
        return params, eight_bits(params)

    with nullcontext() if on_cpu else kernels_on_cpu():
        params, optimizer = make()
        for number in range(3):
            torch.manual_seed(number)
            for p in params:
                p.grad = torch.randn_like(p)
            optimizer.step()
        saved = copy.deepcopy(optimizer.state_dict())
        plain = torch.optim.AdamW(params)
        plain.load_state_dict(copy.deepcopy(saved))  # torch takes the counts as they are, and counts on
        plain.step()
        assert {state["step"].item() for state in plain.state.values()} == {4.0}
        others, other = make()
        other.load_state_dict(saved)
        for p, q in zip(params, others, strict=True):
            for name in ("exp_avg_codes", "exp_avg_sq_codes"):
                mine, loaded = optimizer.state[p][name].int(), other.state[q][name].int()
                changed = (mine != loaded).float().mean()
                assert changed == 0 if dtype is torch.float32 else changed < 0.2, name
        for q in others:
            q.grad = torch.ones_like(q)
        other.step()
        assert {state["step"].item() for state in other.state.values()} == {4.0}


def test_one_byte_moments_take_over_from_a_checkpoint_of_adamws(device: CpuDevice) -> None:
    model, adamw = trained(lambda p: torch.optim.AdamW(p, lr=1e-2), 4)
    mine = eight_bits(model.parameters())
    mine.load_state_dict({**mine.state_dict(), "state": copy.deepcopy(adamw.state_dict()["state"])})
    saved = mine.state_dict()["state"]
    for index, p in enumerate(model.parameters()):
        m = saved[index]["exp_avg"]
        assert (m - adamw.state[p]["exp_avg"]).norm() < 0.05 * m.norm()
    step(model, mine, 4)
    assert device.launched[-1] == "adamw_8bit"
    assert {state["step"].item() for state in mine.state.values()} == {5.0}


def test_moments_of_a_checkpoint_that_lie_in_another_order_stay_with_their_elements(
    device: CpuDevice,
) -> None:
    weight = nn.Parameter(torch.randn(4, 30, 3, 3))
    adamw = torch.optim.AdamW([weight], lr=1e-2)
    weight.grad = torch.randn_like(weight)
    adamw.step()
    turned = nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
    mine = eight_bits([turned])
    mine.load_state_dict({**mine.state_dict(), "state": copy.deepcopy(adamw.state_dict()["state"])})
    for name in ("exp_avg", "exp_avg_sq"):
        m = mine.state_dict()["state"][0][name]
        assert (m - adamw.state[weight][name]).norm() < 0.05 * m.norm()


@pytest.mark.parametrize("on_cpu", [False, True])
def test_moments_of_a_parameter_that_the_script_turns_stay_with_their_elements(on_cpu: bool) -> None:
    """As `model.to(memory_format=torch.channels_last)` turns it, after the first steps."""
    ends = []
    for turns in (False, True):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(4, 300, 3, 3))
        scale = torch.logspace(0, 3, 300).view(1, 300, 1, 1)
        with nullcontext() if on_cpu else kernels_on_cpu():
            mine = eight_bits([weight])
            for number in range(4):
                if turns and number == 2:
                    before = mine.state_dict()["state"][0]["exp_avg"].clone()
                    weight.data = weight.data.to(memory_format=torch.channels_last)
                    assert torch.equal(mine.state_dict()["state"][0]["exp_avg"], before)
                weight.grad = torch.randn(4, 300, 3, 3) * scale
                mine.step()
            ends.append(mine.state_dict()["state"][0])
            assert mine.state[weight]["exp_avg_codes"].stride() == weight.stride()
    for name in ("exp_avg", "exp_avg_sq"):
        assert (ends[1][name] - ends[0][name]).norm() < 0.05 * ends[0][name].norm()


def test_copies_of_one_byte_moments_keep_the_codes(device: CpuDevice) -> None:
    _, optimizer = trained(eight_bits, steps=2)
    twin = pickle.loads(pickle.dumps(optimizer))
    saved = [list(each.state_dict()["state"].values()) for each in (optimizer, twin)]
    for one, other in zip(*saved, strict=True):
        assert set(one) == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(one[name], other[name]) for name in one)
