"""The kernels as the tuner's action puts them under an optimizer."""

from __future__ import annotations

import pytest
import torch
from diagnose.kernels._swap import swap_of

from diagnose.actions._shadow import compare_update
from diagnose.actions.fused_optimizer import FusedOptimizer
from diagnose.core.job import Job
from tests.kernels_on_cpu import (
    MAKERS,
    CpuDevice,
    assert_equal,
    everything,
    failing,
    network,
    network_and,
    step,
)

pytest_plugins = ("tests.kernels_on_cpu",)


def test_the_tuners_action_uses_them_where_they_can_be_used(device: CpuDevice) -> None:
    model, optimizer = network_and("adamw")
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
    model, optimizer = network_and("adamw")
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
    model, optimizer = network_and("adamw")
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
