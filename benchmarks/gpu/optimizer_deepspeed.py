"""DeepSpeed's optimizer of bf16 parameters with fp32 masters, called as its engine calls it."""

from __future__ import annotations

import torch
from optimizer_clock import Pipeline
from optimizer_contenders import ADAM, Work
from torch import Tensor, distributed


def bf16_optimizer(work: Work) -> Pipeline:
    """Adds bf16 gradients to fp32 ones, finds their norm, clips, steps the masters, copies them to bf16 and
    zeroes the fp32 gradients, in the one flat tensor that each has."""
    from deepspeed import comm
    from deepspeed.ops.adam import FusedAdam
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    backend = "gloo" if work.dry_run else "nccl"
    if not distributed.is_initialized():  # it asks for a group even where there is one rank
        distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    comm.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    params = [param.detach().clone().requires_grad_() for param in work.params]  # it moves their storage
    for param, grad in zip(params, work.grads, strict=True):
        param.grad = grad
    optimizer = BF16_Optimizer(
        FusedAdam(params, **ADAM),
        param_names={param: str(number) for number, param in enumerate(params)},
        bfloat16_config=DeepSpeedBF16Config(enabled=True),
        clip_grad=work.max_norm,
        dp_process_group=distributed.group.WORLD,
        grad_acc_dtype=torch.float32,
    )

    def step() -> None:
        optimizer.update_hp_grads()
        optimizer.step()

    [flat] = optimizer.fp32_groups_flat_partition
    return Pipeline(step=step, weights=views_of(flat.detach(), work.params))


def views_of(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    """The parts of a flat tensor, in these shapes."""
    parts = flat[: sum(each.numel() for each in like)].split([each.numel() for each in like])
    return [part.view_as(each) for part, each in zip(parts, like, strict=True)]
