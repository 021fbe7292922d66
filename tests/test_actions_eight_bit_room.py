"""Moments of one byte where the device has no room to put them in, or to take them out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from diagnose.actions import _eight_bit_step
from diagnose.actions.eight_bit_states import EightBitStates
from tests.kernels_on_cpu import CpuDevice, kernels_on_cpu
from tests.test_actions_eight_bit import BYTES, PLAIN, kept, train, training


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    with kernels_on_cpu() as emulated:
        yield emulated


def test_where_the_device_has_no_room_to_undo_it_the_cpu_has(device, monkeypatch):
    model, optimizer, job = training()
    action, real, calls = EightBitStates(), _eight_bit_step.decoded, []
    before = action.state(job)

    def fails(*args, **kwargs):
        calls.append(args)
        if len(calls) in (2, 5):
            raise torch.OutOfMemoryError("no room for moments")
        return real(*args, **kwargs)

    with action.apply(job, []):
        train(model, optimizer, 1)
        shown = copy.deepcopy(optimizer.state_dict()["state"])
        monkeypatch.setattr(_eight_bit_step, "decoded", fails)
    action.verify_undone(job, before)
    assert len(calls) == 2 * 4 + 3, "the first failed at its second moment, the second at its first"
    for state, expected in zip(optimizer.state.values(), shown.values(), strict=True):
        assert all(torch.equal(state[name], expected[name]) for name in PLAIN)
    train(model, optimizer, 1)


def without_room(monkeypatch: pytest.MonkeyPatch, fits: Callable[[int], bool]) -> list[int]:
    """Lets the device take the moments only of parameters for which `fits` says so, by the number of the
    attempt. Returns the attempts."""
    attempts: list[int] = []

    def moved(plain: dict[str, Any], p: torch.Tensor) -> dict[str, Any]:
        attempts.append(len(attempts))
        return plain if fits(attempts[-1]) else {}

    monkeypatch.setattr(_eight_bit_step, "_on_device", moved)
    return attempts


def test_what_finds_no_room_at_first_finds_it_when_the_other_codes_are_freed(device, monkeypatch):
    model, optimizer, job = training()
    action, emptied = EightBitStates(), []
    before = action.state(job)
    attempts = without_room(monkeypatch, lambda number: number != 1)
    with action.apply(job, []):
        train(model, optimizer, 1)
        shown = copy.deepcopy(optimizer.state_dict()["state"])
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(attempts)))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    action.verify_undone(job, before)
    monkeypatch.undo()
    assert (emptied, len(attempts)) == ([4], 5)
    for state, expected in zip(optimizer.state.values(), shown.values(), strict=True):
        assert all(torch.equal(state[name], expected[name]) for name in PLAIN)
    train(model, optimizer, 1)


def test_moments_that_find_no_room_stay_coded_and_the_kernels_go_on(device, monkeypatch):
    """Torch's own step could do nothing with codes, nor with moments elsewhere."""
    model, optimizer, job = training()
    without_room(monkeypatch, lambda number: number < 2)
    with (
        pytest.raises(RuntimeError, match="no room for the moments of 2 parameters: all stay in one byte"),
        EightBitStates().apply(job, []),
    ):
        train(model, optimizer, 1)
    shown = copy.deepcopy(optimizer.state_dict()["state"])
    assert all(set(state) == PLAIN for state in shown.values())
    plain, plainly, _ = training(4)
    assert train(model, optimizer, 5) == pytest.approx(train(plain, plainly, 5), rel=0.05)
    assert kept(optimizer) == BYTES
    assert {float(state["step"]) for state in optimizer.state.values()} == {9.0}
    train(*copy.deepcopy((model, optimizer)), 1)


def test_the_scripts_own_error_comes_before_that_there_was_no_room(device, monkeypatch):
    model, optimizer, job = training()
    without_room(monkeypatch, lambda number: False)
    with pytest.raises(KeyboardInterrupt), EightBitStates().apply(job, []):
        train(model, optimizer, 1)
        raise KeyboardInterrupt
    train(model, optimizer, 1)


def test_a_state_is_taken_to_the_device_or_not_at_all():
    plain = {"step": torch.tensor(1.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    taken = _eight_bit_step._on_device(plain, torch.empty(2, device="meta"))
    assert {name: each.device.type for name, each in taken.items()} == {
        "step": "cpu",
        "exp_avg": "meta",
        "exp_avg_sq": "meta",
    }

    class Full:
        @property
        def device(self) -> torch.device:
            raise torch.OutOfMemoryError("no room for moments")

    assert _eight_bit_step._on_device(plain, Full()) == {}
