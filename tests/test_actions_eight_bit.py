"""Moments of one byte in a live AdamW: the real kernel on an emulated device, put in and taken out."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator

import pytest
import torch
from diagnose.kernels import _adamw_8bit_state
from diagnose.kernels._adamw_8bit_state import decoded, encode
from torch import nn

from diagnose.actions import _eight_bit_step
from diagnose.actions.base import CannotApply
from diagnose.actions.eight_bit_states import EightBitStates
from diagnose.core.job import Job
from tests.kernels_on_cpu import CpuDevice, failing, kernels_on_cpu

BYTES = {"exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales", "step"}
PLAIN = {"exp_avg", "exp_avg_sq", "step"}


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu() as emulated:
        yield emulated


def training(steps: int = 3) -> tuple[nn.Module, torch.optim.AdamW, Job]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, steps)
    return model, optimizer, Job(models=[model], optimizers=[optimizer])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    inputs = torch.linspace(-1, 1, 56).view(8, 7)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs[:, :3].square()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def kept(optimizer: torch.optim.Optimizer) -> set[str]:
    return {name for state in optimizer.state.values() for name in state}


def test_the_moments_are_bytes_while_it_is_on_and_the_kernel_steps_them(device):
    model, optimizer, job = training()
    action = EightBitStates()
    before = action.state(job)
    with action.apply(job, []):
        train(model, optimizer, 3)
        assert kept(optimizer) == BYTES
        assert device.launched.count("adamw_8bit") == 3
        assert all(state["exp_avg_codes"].dtype is torch.uint8 for state in optimizer.state.values())
    assert kept(optimizer) == PLAIN
    action.verify_undone(job, before)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}
    train(model, optimizer, 1)


def test_training_goes_where_adamw_goes(device):
    model, optimizer, job = training()
    plain, plainly, _ = training()
    with EightBitStates().apply(job, []):
        ours = train(model, optimizer, 25)
    theirs = train(plain, plainly, 25)
    assert ours[-1] < 0.7 * ours[0]
    assert ours[-1] == pytest.approx(theirs[-1], rel=0.05)


def test_coding_and_decoding_moves_a_moment_by_what_a_code_can_tell(device):
    _, optimizer, job = training()
    before = copy.deepcopy(list(optimizer.state.values()))
    with EightBitStates().apply(job, []):
        pass
    for was, now in zip(before, optimizer.state.values(), strict=True):
        largest = was["exp_avg"].abs().max()
        torch.testing.assert_close(now["exp_avg"], was["exp_avg"], rtol=1 / 32, atol=float(largest) / 4096)
        root = was["exp_avg_sq"].sqrt()
        torch.testing.assert_close(
            now["exp_avg_sq"].sqrt(), root, rtol=1 / 64, atol=float(root.max()) / 4096
        )
        assert now["step"] is not None and now["exp_avg"].stride() == was["exp_avg"].stride()


def test_a_second_time_nothing_more_is_lost(device):
    _, optimizer, job = training()
    with EightBitStates().apply(job, []):
        pass
    once = copy.deepcopy(optimizer.state_dict()["state"])
    with EightBitStates().apply(job, []):
        pass
    for first, second in zip(once.values(), optimizer.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(first[name], second[name], rtol=1e-6, atol=0)


def test_a_checkpoint_written_meanwhile_loads_into_plain_torch(device):
    model, optimizer, job = training()
    with EightBitStates().apply(job, []):
        train(model, optimizer, 2)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        shown = optimizer.state_dict()["state"]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert {name for state in saved["state"].values() for name in state} == PLAIN
    plain, plainly, _ = training(0)
    plainly.load_state_dict(saved)
    plain.load_state_dict(model.state_dict())
    for index, state in enumerate(plainly.state.values()):
        assert float(state["step"]) == 5.0
        assert torch.equal(state["exp_avg"], shown[index]["exp_avg"])
    assert train(plain, plainly, 3) == train(model, optimizer, 3)


def test_a_checkpoint_of_plain_torchs_loads_meanwhile(device):
    _, plainly, _ = training(6)
    model, optimizer, job = training()
    with EightBitStates().apply(job, []):
        optimizer.load_state_dict(plainly.state_dict())
        assert kept(optimizer) == BYTES
        train(model, optimizer, 1)
        assert {float(state["step"]) for state in optimizer.state_dict()["state"].values()} == {7.0}
    assert kept(optimizer) == PLAIN


def test_a_state_that_the_script_puts_in_its_place_is_gone_on_with(device):
    model, optimizer, job = training()
    earlier = copy.deepcopy(list(optimizer.state.values()))
    with EightBitStates().apply(job, []):
        train(model, optimizer, 2)
        for p, state in zip(optimizer.state, earlier, strict=True):
            optimizer.state[p] = state
        train(model, optimizer, 2)
        assert kept(optimizer) == BYTES
        assert {float(state["step"]) for state in optimizer.state.values()} == {5.0}
        optimizer.state.clear()
        train(model, optimizer, 2)
        assert {float(state["step"]) for state in optimizer.state.values()} == {2.0}
    assert kept(optimizer) == PLAIN


def test_a_gradient_of_another_layout_is_stepped_all_the_same(device):
    model, optimizer, job = training()
    first = next(model.parameters())
    with EightBitStates().apply(job, []):
        train(model, optimizer, 1)
        optimizer.zero_grad()
        (model(torch.ones(1, 7)).sum()).backward()
        before = first.detach().clone()
        first.grad = first.grad.t().contiguous().t()
        optimizer.step()
        assert not torch.equal(first, before)
    assert kept(optimizer) == PLAIN


def test_a_scheduler_and_a_scaler_work_on(device):
    model, optimizer, job = training()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with EightBitStates().apply(job, []):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        scaler.scale(model(torch.full((1, 7), float("inf"))).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items()), "skipped"
        train(model, optimizer, 1)
        schedule.step()
    assert {float(state["step"]) for state in optimizer.state.values()} == {4.0}


@pytest.mark.parametrize("number", [1.0, float("inf")])
def test_what_the_kernels_leave_of_a_fused_optimizer_is_unscaled_or_skipped(device, number):
    """Torch's fused step would do both itself; it is not the one that follows."""
    ends = []
    for scale in (None, 2.0**12):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, fused=True)
        first = next(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        with EightBitStates().apply(Job(models=[model], optimizers=[optimizer]), []):
            for reading in (1.0, number if scale else 1.0, 2.0):
                optimizer.zero_grad()
                scaler.scale(model(torch.full((1, 7), reading)).square().sum()).backward()
                first.grad = first.grad.t().contiguous().t()
                if reading != float("inf") or scale:
                    scaler.step(optimizer)
                    scaler.update()
        ends.append(first.detach().clone())
    assert ends[1].isfinite().all()
    if number == 1.0:
        torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_made_meanwhile_is_plain_torchs_and_goes_on(device, copied):
    model, optimizer, job = training()
    with EightBitStates().apply(job, []):
        train(model, optimizer, 2)
        twin, twins = copied((model, optimizer))
        assert kept(twins) == PLAIN and not twins._optimizer_step_pre_hooks
        assert "__getstate__" not in vars(twins)
        launched = len(device.launched)
        train(twin, twins, 2)
        assert len(device.launched) == launched
        assert {float(state["step"]) for state in twins.state.values()} == {7.0}
        assert kept(optimizer) == BYTES
        train(model, optimizer, 1)


def test_an_error_while_it_is_put_in_takes_it_out(device, monkeypatch):
    model, optimizer, job = training()
    action, calls = EightBitStates(), []
    before, real = action.state(job), _eight_bit_step.encode

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise torch.OutOfMemoryError("no room for codes")
        real(*args, **kwargs)

    monkeypatch.setattr(_eight_bit_step, "encode", fails)
    with pytest.raises(torch.OutOfMemoryError), action.apply(job, []):
        raise AssertionError("never in force")
    action.verify_undone(job, before)
    train(model, optimizer, 1)


def test_hooks_of_the_scripts_on_what_is_saved_meet_moments(device):
    _, optimizer, job = training()
    seen: list[set[str]] = []
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append(set(saved["state"][0])))
    with EightBitStates().apply(job, []):
        optimizer.state_dict()
    assert seen == [PLAIN]


@pytest.mark.parametrize("num", [0, 1, 256, 1000, 1024, 1025])
@pytest.mark.parametrize("signed", [False, True])
def test_moments_coded_in_pieces_are_bit_for_bit_those_coded_at_once(monkeypatch, signed, num):
    torch.manual_seed(0)
    values = torch.randn(num) if signed else torch.rand(num)
    ends = []
    for most in (1 << 22, 512):
        monkeypatch.setattr(_adamw_8bit_state, "PIECE_ELEMENTS", most)
        codes, scales = torch.zeros(num, dtype=torch.uint8), torch.full((-(-num // 256),), -1.0)
        encode(values, codes, scales, signed=signed)
        ends.append((codes, scales, decoded(codes, scales, signed=signed, like=values)))
    assert all(torch.equal(one, other) for one, other in zip(*ends, strict=True))
    torch.testing.assert_close(ends[0][2], values, rtol=1 / 32, atol=5 / 4096)


def test_it_must_not_stay_where_the_kernel_has_failed_as_other_ranks_may_still_use_it(device, monkeypatch):
    model, optimizer, job = training()
    action = EightBitStates()
    with action.prepare(job, None) as prepared:
        with action.apply(job, prepared):
            train(model, optimizer, 1)
            assert action.why_not_stay(prepared) == ""
            failing("adamw-8bit", device, monkeypatch)
            with pytest.warns(RuntimeWarning, match="code 701"):
                train(model, optimizer, 2)
        assert "code 701" in action.why_not_stay(prepared)
    assert {float(state["step"]) for state in optimizer.state.values()} == {6.0}


def test_an_exception_of_the_scripts_leaves_a_whole_state(device):
    model, optimizer, job = training()
    action = EightBitStates()
    before = action.state(job)
    with pytest.raises(KeyboardInterrupt), action.apply(job, []):
        train(model, optimizer, 1)
        raise KeyboardInterrupt
    action.verify_undone(job, before)
    train(model, optimizer, 1)


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: torch.optim.SGD(p, 0.1), "states of one byte are AdamW's; SGD is another"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW keeps a third moment"),
    ],
)
def test_what_it_cannot_keep_in_bytes_is_refused(device, make, reason):
    optimizer = make(nn.Linear(2, 2).parameters())
    with pytest.raises(CannotApply, match=reason):
        EightBitStates().check(Job(optimizers=[optimizer]))


def test_without_a_gpu_it_says_so():
    _, _, job = training()
    with pytest.raises(CannotApply, match="cpu"):
        EightBitStates().check(job)
