"""Which optimizers are not fused, and for which no setting is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from diagnose.actions.base import CannotApply
from diagnose.actions.fused_optimizer import LATE, FusedOptimizer
from diagnose.core.job import Job
from diagnose.hooks._fusing import adagrad_fuses_on_cuda
from tests.kernels_on_cpu import kernels_on_cpu
from tests.test_actions_optimizer import is_fused


class MyAdamW(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    "make, reason",
    [
        (lambda p: MyAdamW(p), "no fused MyAdamW"),
        (lambda p: torch.optim.RMSprop(p), "no fused RMSprop"),
        (lambda p: torch.optim.AdamW(p, fused=True), "fused already"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable"),
        (lambda p: torch.optim.Adam(p, capturable=True), "capturable"),
    ],
)
def test_it_refuses_what_torch_cannot_fuse(make: Callable[[Any], Any], reason: str) -> None:
    optimizer = make(nn.Linear(2, 2).parameters())
    with pytest.raises(CannotApply, match=reason):
        FusedOptimizer().check(Job(optimizers=[optimizer]))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_it_refuses_sgd_of_16_bits_on_a_cpu_which_torch_fuses_into_nothing(dtype: torch.dtype) -> None:
    model = nn.Linear(64, 64).to(dtype)
    with pytest.raises(CannotApply, match="does not update 16-bit parameters on a CPU"):
        FusedOptimizer().check(Job(models=[model], optimizers=[torch.optim.SGD(model.parameters(), 0.1)]))


def test_it_refuses_sparse_gradients() -> None:
    model = nn.Embedding(5, 2, sparse=True)
    job = Job(models=[model], optimizers=[torch.optim.SGD(model.parameters(), lr=0.1)])
    with pytest.raises(CannotApply, match="sparse"):
        FusedOptimizer().check(job)


def test_of_several_optimizers_those_that_can_are_fused() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    job = Job(
        optimizers=[torch.optim.RMSprop(one.parameters()), torch.optim.AdamW(other.parameters())],
    )
    assert FusedOptimizer().settings(job, None) == {"AdamW.fused": "True"}
    with FusedOptimizer().apply(job, []):
        other(torch.ones(1, 2)).sum().backward()
        assert is_fused(job.optimizers[1].step)


def test_no_setting_is_named_for_what_is_fused_already_or_a_class_one_of_which_torch_cannot_fuse() -> None:
    fused = torch.optim.AdamW(nn.Linear(2, 2).parameters(), fused=True)
    plain = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    assert FusedOptimizer().settings(Job(optimizers=[fused]), None) == {}
    assert FusedOptimizer().settings(Job(optimizers=[fused, plain]), None) == {"AdamW.fused": "True"}
    dense, sparse = nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)
    both = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (dense, sparse)]
    assert FusedOptimizer().settings(Job(models=[dense, sparse], optimizers=both), None) == {}


@pytest.mark.parametrize("late", ["frozen", "seen by the hooks", ""])
def test_no_setting_is_named_where_torchs_fused_sgd_would_raise_an_exception_later(late: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(late != "frozen")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    job = Job(models=[model], optimizers=[optimizer])
    if late == "seen by the hooks":
        job.facts["late_momenta"] = True
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    settings = FusedOptimizer().settings(job, None)
    assert settings == ({"note": LATE} if late else {"SGD.fused": "True"})


def test_no_setting_is_named_where_torchs_fused_step_would_compute_garbage() -> None:
    weight = nn.Parameter(torch.randn(8, 4, 3, 3))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.randn(8, 4, 3, 3)
    assert FusedOptimizer().settings(Job(optimizers=[optimizer]), None) == {"AdamW.fused": "True"}
    weight.grad = weight.grad.to(memory_format=torch.channels_last)
    assert FusedOptimizer().settings(Job(optimizers=[optimizer]), None) == {}


@pytest.mark.gpu
def test_on_a_gpu_what_torch_fuses_already_is_served_and_has_no_setting() -> None:
    model = nn.Linear(64, 64).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    action, job = FusedOptimizer(), Job(models=[model], optimizers=[optimizer], device="cuda")
    action.check(job)
    assert action.settings(job, None) == {}
    with action.apply(job, []):
        assert action.settings(job, None) == {}


@pytest.mark.parametrize("refused", [True, False])
def test_a_torch_that_cannot_fuse_adagrad_on_a_gpu_is_known_by_the_check_it_makes(
    refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    check: Any = lambda param, cuda_unsupported=False: None  # noqa: E731

    def of_torch_2_11(self: Any, param: Any) -> None:
        check(param, cuda_unsupported=True)

    def later(self: Any, param: Any) -> None:
        check(param)

    monkeypatch.setattr(torch.optim.Adagrad, "_init_group", of_torch_2_11 if refused else later)
    assert adagrad_fuses_on_cuda() is not refused


def test_a_step_that_the_script_compiles_is_left_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    model(torch.ones(1, 2)).sum().backward()
    with FusedOptimizer().apply(Job(optimizers=[optimizer]), []):
        assert not is_fused(step)


def test_without_a_finding_it_is_tried_only_where_large_optimizers_step_on_a_cpu_or_by_kernels() -> None:
    large = torch.optim.SGD([nn.Parameter(torch.zeros(400, 400))], momentum=0.9)
    small = torch.optim.SGD([nn.Parameter(torch.zeros(40, 40))], momentum=0.9)
    FusedOptimizer().check_unasked(Job(optimizers=[small, large]))
    with pytest.raises(CannotApply, match="fewer than 100,000 elements"):
        FusedOptimizer().check_unasked(Job(optimizers=[small]))
    with pytest.raises(CannotApply, match="the rules find"):
        FusedOptimizer().check_unasked(Job(optimizers=[large], device="cuda"))
    with kernels_on_cpu():
        FusedOptimizer().check_unasked(Job(optimizers=[large], device="cuda"))
        with pytest.raises(CannotApply, match="fewer than 100,000 elements"):
            FusedOptimizer().check_unasked(Job(optimizers=[small], device="cuda"))
