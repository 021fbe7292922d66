"""The rows of the table that `optimizers.py` prints, each with what it must compute, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diagnose.kernels.base import Settings
from diagnose.kernels.lamb import Lamb
from optimizer_clock import Pipeline
from optimizer_contenders import (
    ADAM,
    BETAS,
    DECAY,
    EPS,
    LAMB_MAX_NORM,
    LOSS_SCALE,
    LR,
    Contender,
    Work,
    adamw,
    compiled,
    masters,
    of_library,
    ours,
    scaled,
    sgd,
    stepping,
)
from optimizer_deepspeed import bf16_optimizer
from optimizer_tables import masters_by_kernel, norm_by_kernel, norm_by_torch
from torch import Tensor

Reference = Callable[[list[Tensor], list[list[Tensor]]], list[Tensor]]
"""From parameters and the gradients of each step, clipped, in float64, to the parameters at the end."""


def by_adamw(params: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """torch's AdamW, one parameter at a time."""
    return by_torch(adamw(foreach=False)(params), params, steps)


def by_sgd(params: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """torch's SGD, one parameter at a time."""
    return by_torch(sgd(foreach=False)(params), params, steps)


def by_torch(
    optimizer: torch.optim.Optimizer, params: list[Tensor], steps: list[list[Tensor]]
) -> list[Tensor]:
    """What an optimizer makes of its parameters."""
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
    return params


def by_lamb(params: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """The kernel's reference, which is written from the paper and apex."""
    arrays = [{"p": p.cpu().numpy(), "m": 0 * p.cpu().numpy(), "v": 0 * p.cpu().numpy()} for p in params]
    for number, grads in enumerate(steps, 1):
        settings = Settings(step=number, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY)
        for index, grad in enumerate(grads):
            arrays[index] = Lamb().reference({**arrays[index], "g": grad.cpu().numpy()}, settings)
    return [torch.from_numpy(each["p"]).to(p.device) for each, p in zip(arrays, params, strict=True)]


def by_norm(params: list[Tensor], steps: list[list[Tensor]]) -> list[Tensor]:
    """The norm of the last step's gradients."""
    return [torch.stack([grad.square().sum() for grad in steps[-1]]).sum().sqrt().reshape(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """One row.

    Attributes:
        letter: Its name.
        title: What is timed.
        contenders: Who does it; the first is what others are compared with by default.
        reference: What must come of it.
        worst_error: How far the weights may be from the reference, in parts of how far they moved.
        dtype: Of the parameters.
        grad_dtype: Of the gradients.
        clip_share: To which share of their norm the gradients are clipped; `None` if they are not.
        clip_norm: To which norm they are clipped, where that is the optimizer's own doing.
        loss_scale: What the gradients are multiplied by.
    """

    letter: str
    title: str
    contenders: tuple[Contender, ...]
    reference: Reference = by_adamw
    worst_error: float = 1e-3
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype = torch.float32
    clip_share: float | None = None
    clip_norm: float | None = None
    loss_scale: float = 1.0


ACTIVE, INACTIVE = 0.5, 10.0
"""Shares of the norm: the one clips, the other does not."""

BF16_ERROR, BYTES_ERROR = 0.1, 0.3
"""Of a few steps from weights of the size that layers have: bf16 keeps three digits of a weight, and a
moment of one byte one part in thirty of itself."""

SMALL_ONES = "32 bits below 4096 elements"

DEEPSPEED = of_library("deepspeed.ops.adam", "FusedAdam", **ADAM)


def other(
    name: str, num_bytes: float | None, build: Callable[[Work], Pipeline], **further: Any
) -> Contender:
    """A contender of others', with the bytes that its passes read and write for each element."""
    return Contender(name=name, bytes_per_element=num_bytes, build=build, **further)


def mine(name: str, num_bytes: float, build: Callable[[Work], Pipeline], note: str = "") -> Contender:
    """One of ours."""
    return Contender(name=name, bytes_per_element=num_bytes, build=build, ours=True, note=note)


def clipped(letter: str, title: str, share: float, exact_bytes: int) -> BenchRow:
    """The rows with clipping before the step."""
    return BenchRow(
        letter=letter,
        title=title,
        clip_share=share,
        contenders=(
            other("torch default", 92, stepping(adamw(), clips=True)),
            other("torch fused", 40, stepping(adamw(fused=True), clips=True)),
            other("torch compiled", 36, compiled(clips=True), compiled=True),
            other("DeepSpeed FusedAdam", 40, stepping(DEEPSPEED, clips=True), builds=True),
            mine("ours, exact clip", exact_bytes, ours(adamw(), clips=True, clip="exact")),
            mine("ours, deferred clip", 32, ours(adamw(), clips=True, clip="deferred")),
            mine(
                "ours, deferred, moving",
                32,
                ours(adamw(), clips=True, moving=True, clip="deferred"),
                "new gradients",
            ),
        ),
    )


ROWS = (
    BenchRow(
        letter="A",
        title="AdamW step, fp32",
        contenders=(
            other("torch default", 80, stepping(adamw(), clips=False)),
            other("torch fused", 28, stepping(adamw(fused=True), clips=False)),
            other("torch compiled", 28, compiled(clips=False), compiled=True),
            other("DeepSpeed FusedAdam", 28, stepping(DEEPSPEED, clips=False), builds=True),
            mine("ours", 28, ours(adamw(), clips=False, clip="off")),
            mine("ours, moving", 28, ours(adamw(), clips=False, moving=True, clip="off"), "new gradients"),
        ),
    ),
    clipped("B", "clip (active) and AdamW step, fp32", ACTIVE, 40),
    clipped("B0", "clip (inactive) and AdamW step, fp32", INACTIVE, 32),
    BenchRow(
        letter="C",
        title="GradScaler unscale, clip and AdamW step, fp32",
        clip_share=ACTIVE,
        loss_scale=LOSS_SCALE,
        contenders=(
            other("torch default", 100, scaled(adamw()), note="waits for the GPU"),
            other("torch fused", 48, scaled(adamw(fused=True))),
            other("DeepSpeed FusedAdam", 48, scaled(DEEPSPEED), note="waits for the GPU", builds=True),
            mine("ours, exact clip", 48, scaled(adamw(fused=True), clip="exact"), "torch unscales"),
            mine("ours, deferred clip", 32, scaled(adamw(), clip="deferred")),
        ),
    ),
    BenchRow(
        letter="C0",
        title="GradScaler step without clip, AdamW, fp32",
        loss_scale=LOSS_SCALE,
        contenders=(
            other("torch default", 88, scaled(adamw(), clips=False), note="waits for the GPU"),
            other("torch fused", 40, scaled(adamw(fused=True), clips=False)),
            other(
                "DeepSpeed FusedAdam",
                36,
                scaled(DEEPSPEED, clips=False),
                note="waits for the GPU",
                builds=True,
            ),
            mine(
                "ours, exact clip",
                36,
                scaled(adamw(fused=True), clips=False, clip="exact"),
                "gradients end unscaled",
            ),
            mine("ours, deferred clip", 32, scaled(adamw(), clips=False, clip="deferred")),
        ),
    ),
    BenchRow(
        letter="D",
        title="clip, AdamW on fp32 masters, bf16 copy; bf16 gradients",
        dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        clip_share=ACTIVE,
        contenders=(
            other("torch, by hand", 52, masters, note="fused, fp32 gradients"),
            other("DeepSpeed BF16_Optimizer", 68, bf16_optimizer, note="adds up in fp32", builds=True),
            mine("ours, by table", 30, masters_by_kernel),
        ),
    ),
    BenchRow(
        letter="E",
        title="clip and AdamW step, all bf16",
        dtype=torch.bfloat16,
        grad_dtype=torch.bfloat16,
        clip_share=ACTIVE,
        worst_error=BF16_ERROR,
        contenders=(
            other("torch default", 46, stepping(adamw(), clips=True), note="rounds to nearest"),
            other("torch fused", 20, stepping(adamw(fused=True), clips=True), note="rounds to nearest"),
            other(
                "torchao _AdamW",
                20,
                stepping(
                    of_library("torchao.optim", "_AdamW", **ADAM, bf16_stochastic_round=True), clips=True
                ),
                note="rounds by chance",
                compiled=True,
            ),
            mine(
                "ours, deferred clip",
                16,
                ours(adamw(), clips=True, clip="deferred", allow=["stochastic-rounding"]),
                "rounds by chance",
            ),
        ),
    ),
    BenchRow(
        letter="F",
        title="AdamW step with 8-bit moments, fp32",
        worst_error=BYTES_ERROR,
        contenders=(
            other("torch fused", 28, stepping(adamw(fused=True), clips=False), note="moments of 32 bits"),
            other(
                "bitsandbytes AdamW8bit",
                16.06,
                stepping(of_library("bitsandbytes.optim", "AdamW8bit", **ADAM), clips=False),
                note=SMALL_ONES,
            ),
            other(
                "torchao AdamW8bit",
                16.06,
                stepping(of_library("torchao.optim", "AdamW8bit", **ADAM), clips=False),
                note=SMALL_ONES,
                compiled=True,
            ),
            other(
                "FlashAdamW",
                16.25,
                # fp32 parameters have nothing to correct, and it refuses to
                stepping(
                    of_library("flashoptim", "FlashAdamW", **ADAM, master_weight_bits=None), clips=False
                ),
            ),
            mine("ours", 16.06, stepping(of_library("diagnose.kernels", "AdamW8bit", **ADAM), clips=False)),
        ),
    ),
    BenchRow(
        letter="G",
        title="SGD step, nesterov and weight decay, fp32",
        reference=by_sgd,
        contenders=(
            other("torch default", 56, stepping(sgd(), clips=False)),
            other("torch fused", 20, stepping(sgd(fused=True), clips=False)),
            mine("ours", 20, ours(sgd(), clips=False, clip="off")),
        ),
    ),
    BenchRow(
        letter="H",
        title="LAMB with its clip, fp32",
        reference=by_lamb,
        clip_norm=LAMB_MAX_NORM,
        contenders=(
            other(
                "timm Lamb",
                None,
                stepping(
                    of_library("timm.optim", "Lamb", **ADAM, max_grad_norm=LAMB_MAX_NORM), clips=False
                ),
            ),
            mine(
                "ours",
                44,
                stepping(
                    of_library("diagnose.kernels", "Lamb", **ADAM, max_grad_norm=LAMB_MAX_NORM), clips=False
                ),
            ),
        ),
    ),
    BenchRow(
        letter="I",
        title="norm of all gradients, fp32",
        reference=by_norm,
        worst_error=1e-5,
        contenders=(
            other("torch get_total_norm", 4, norm_by_torch),
            mine("ours, by table", 4, norm_by_kernel),
        ),
    ),
)
