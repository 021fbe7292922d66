"""Kernels under no optimizer of torch's, driven by a table: masters, the norm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from diagnose.kernels._structs import PAIRS, Feature, Group, GroupFlag, Row
from diagnose.kernels._table import Table
from optimizer_clock import Pipeline
from optimizer_contenders import BETAS, DECAY, EPS, LR, Work
from torch import Tensor

COPY_IS_BF16 = 1
"""Of a row's flags."""


def group(flags: GroupFlag) -> Group:
    """The settings that all contenders have."""
    return Group(lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, flags=int(flags))


def masters_by_kernel(work: Work) -> Pipeline:
    """fp32 masters of bf16 parameters: the norm, then one update that clips and writes the bf16 copy."""
    weights = [param.detach().float() for param in work.params]
    m, v = zeros_like(weights, torch.float32), zeros_like(weights, torch.float32)
    rows = [
        Row(
            p=weight.data_ptr(),
            m=m[index].data_ptr(),
            v=v[index].data_ptr(),
            copy=work.params[index].data_ptr(),
            count=weight.numel(),
            pair=PAIRS[torch.float32, torch.bfloat16, torch.float32],
            flags=COPY_IS_BF16,
        )
        for index, weight in enumerate(weights)
    ]
    table = Table(work.device, rows, [group(GroupFlag.DECOUPLED)])
    defines = {"PAIRS": 1 << rows[0].pair, "FEATURES": int(Feature.COPY)}
    outcome_4 = torch.zeros(4, device=work.device)

    def step() -> None:
        table.point_to(addresses(work.grads))
        table.run("norm", "gradient_norm", outcome_4=outcome_4, max_norm=work.max_norm)
        table.run("adamw", "adamw", defines, clip_coef=outcome_4[1])

    return Pipeline(step=holding(step, table, weights, m, v), weights=weights)


def norm_by_kernel(work: Work) -> Pipeline:
    """The norm of all gradients."""
    rows = [Row(count=grad.numel(), pair=PAIRS[(grad.dtype,) * 3]) for grad in work.grads]
    table = Table(work.device, rows, [Group()])
    outcome_4 = torch.zeros(4, device=work.device)

    def step() -> None:
        table.point_to(addresses(work.grads))
        table.run("norm", "gradient_norm", outcome_4=outcome_4, max_norm=work.max_norm)

    return Pipeline(step=holding(step, table), weights=[outcome_4[:1]])


def norm_by_torch(work: Work) -> Pipeline:
    """Likewise, as `clip_grad_norm_` finds it."""
    from torch.nn.utils import get_total_norm

    found: list[Tensor] = []

    def step() -> None:
        found[:] = [get_total_norm(work.grads).reshape(1)]

    return Pipeline(step=step, weights=found)


def addresses(grads: list[Tensor]) -> list[int]:
    """Where the gradients are: looked up at each step, as under a live optimizer."""
    return list(map(Tensor.data_ptr, grads))


def zeros_like(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """States before the first step."""
    return [torch.zeros_like(tensor, dtype=dtype) for tensor in tensors]


def holding(step: Callable[[], None], *held: object) -> Callable[[], object]:
    """Keeps alive what the rows point to."""

    def inner(kept: tuple[object, ...] = held) -> None:
        step()

    return inner
