"""What each optimizer of torch keeps and how its groups read, in the kernels' terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diagnose.kernels._masters import has_master
from diagnose.kernels._structs import Group, GroupFlag
from torch.optim import SGD, Adam, AdamW, Optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to update parameters.

    Attributes:
        stem: The kernel's name.
        entries: Its entry points, launched in this order at each step.
        moments: From a group to the names of the states in the order of the row's `m`, `v`, `v_max`.
        group: From a group to what the kernel reads of it. Leaves out the learning rate.
        counts_steps: Whether the state of a parameter holds `step`.
        starts_from_gradient: Whether the first step overwrites the state and does not read it.
        moment_dtype: Type of the first two moments, if it is not the parameter's.
        block_elements: If not 0, the third and fourth moment hold a number in fp32 for so many elements of
            a parameter each.
        by_element: Whether each element is updated by itself, so that a shard of a parameter can be.
        master: Name of the state that holds a parameter of 16 bits in fp32; empty if there is none.
        unscales: Whether its step can leave gradients divided by the factor of a `GradScaler`, as torch's
            fused steps do.
    """

    stem: str
    entries: tuple[str, ...]
    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    group: Callable[[Mapping[str, Any]], Group]
    counts_steps: bool = True
    starts_from_gradient: bool = False
    moment_dtype: torch.dtype | None = None
    block_elements: int = 0
    by_element: bool = False
    master: str = ""
    unscales: bool = False

    def held(self, group: Mapping[str, Any], param: torch.Tensor) -> tuple[str, ...]:
        """The names of all states of a parameter that its row points to: moments, then the master."""
        own = (self.master,) if self.master and has_master(param) else ()
        return self.moments(group) + own

    def dtypes(
        self, param: torch.Tensor, moments: Sequence[torch.Tensor]
    ) -> tuple[torch.dtype, torch.dtype]:
        """The types by which a kernel's body is found: of what is stepped, a parameter or its master, and
        of its states, which may be none yet. Codes of one byte are decoded to fp32."""
        stepped = torch.float32 if self.master and has_master(param) else param.dtype
        state = next((moment.dtype for moment in moments), self.moment_dtype or stepped)
        return stepped, torch.float32 if state is torch.uint8 else state

    def make(self, place: int, param: torch.Tensor) -> torch.Tensor:
        """The moment at a place of `moments`, of a parameter before its first step."""
        if self.block_elements and place >= 2:
            num_blocks = -(-param.numel() // self.block_elements)
            return torch.zeros(num_blocks, dtype=torch.float32, device=param.device)
        return torch.zeros_like(
            param, dtype=self.moment_dtype or param.dtype, memory_format=torch.preserve_format
        )

    def alike(self, moments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Those of the moments that hold an element for each of the parameter's."""
        return moments[:2] if self.block_elements else moments


def _adam_moments(group: Mapping[str, Any]) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _adam_group(group: Mapping[str, Any]) -> Group:
    flags = GroupFlag(0)
    if group["maximize"]:
        flags |= GroupFlag.MAXIMIZE
    if group.get("amsgrad"):
        flags |= GroupFlag.AMSGRAD
    if group.get("decoupled_weight_decay"):
        flags |= GroupFlag.DECOUPLED
    beta1, beta2 = group["betas"]
    return Group(
        beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], flags=flags
    )


def _adamw_group(group: Mapping[str, Any]) -> Group:
    struct = _adam_group(group)
    struct.flags |= GroupFlag.DECOUPLED  # before torch 2.7 AdamW was a class of its own, without the flag
    return struct


def _sgd_group(group: Mapping[str, Any]) -> Group:
    flags = GroupFlag(0)
    if group["maximize"]:
        flags |= GroupFlag.MAXIMIZE
    if group["nesterov"]:
        flags |= GroupFlag.NESTEROV
    return Group(
        beta1=group["momentum"], beta2=group["dampening"], weight_decay=group["weight_decay"], flags=flags
    )


ADAM = Algorithm(
    stem="adamw",
    entries=("adamw",),
    moments=_adam_moments,
    group=_adam_group,
    by_element=True,
    unscales=True,
)

ALGORITHMS: dict[type[Optimizer], Algorithm] = {
    Adam: ADAM,
    AdamW: replace(ADAM, group=_adamw_group),
    SGD: Algorithm(
        stem="sgd",
        entries=("sgd",),
        moments=lambda group: ("momentum_buffer",) if group["momentum"] else (),
        group=_sgd_group,
        counts_steps=False,
        starts_from_gradient=True,
        by_element=True,
        unscales=True,
    ),
}
"""By the exact class: a subclass may compute anything."""


def _lion_group(group: Mapping[str, Any]) -> Group:
    beta1, beta2 = group["betas"]
    flags = GroupFlag.MAXIMIZE if group.get("maximize") else GroupFlag(0)
    return Group(beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"], flags=flags)


def _lamb_group(group: Mapping[str, Any]) -> Group:
    flags = GroupFlag.MAXIMIZE if group["maximize"] else GroupFlag(0)
    if not group["bias_correction"]:
        flags |= GroupFlag.NO_BIAS_CORRECTION
    if not group["grad_averaging"]:
        flags |= GroupFlag.NO_GRAD_AVERAGING
    if group["use_nvlamb"]:
        flags |= GroupFlag.ALWAYS_ADAPT
    beta1, beta2 = group["betas"]
    return Group(
        beta1=beta1, beta2=beta2, eps=group["eps"], weight_decay=group["weight_decay"], flags=flags
    )


LION = Algorithm(
    stem="lion",
    entries=("lion",),
    moments=lambda group: ("exp_avg",),
    group=_lion_group,
    counts_steps=False,
    by_element=True,
)

ADAMW_8BIT = Algorithm(
    stem="adamw-8bit",
    entries=("adamw_8bit",),
    moments=lambda group: ("exp_avg_codes", "exp_avg_sq_codes", "exp_avg_scales", "exp_avg_sq_scales"),
    group=_adamw_group,
    moment_dtype=torch.uint8,
    block_elements=256,
)

ADAMW_MASTER = Algorithm(
    stem="adamw",
    entries=("adamw",),
    moments=_adam_moments,
    group=_adamw_group,
    moment_dtype=torch.float32,
    master="master_param",
)

LAMB = Algorithm(
    stem="lamb",
    entries=("lamb_moments", "lamb_update"),
    moments=lambda group: ("exp_avg", "exp_avg_sq"),
    group=_lamb_group,
)


def algorithm_of(optimizer: Optimizer) -> Algorithm | None:
    """How kernels step an optimizer of exactly this class: torch's, or one of ours, which says so."""
    kind = type(optimizer)
    return ALGORITHMS.get(kind) or vars(kind).get("algorithm")


def group_struct(algorithm: Algorithm, group: Mapping[str, Any], place: torch.device) -> Group:
    """What the kernels read of a group. A learning rate that is a tensor on the device is read there."""
    struct = algorithm.group(group)
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.device == place:
        struct.lr_tensor = lr.data_ptr()
        struct.flags |= GroupFlag.LR_IS_F64 if lr.dtype is torch.float64 else 0
    else:
        struct.lr = float(lr)
    return struct


NUMBERS = ("eps", "weight_decay", "momentum", "dampening")


def group_refusals(group: Mapping[str, Any]) -> list[str]:
    """Why the parameters of a group are left to torch, in words."""
    found = []
    if group.get("differentiable"):
        found.append("it is differentiable, which a kernel's step is not")
    numbers = [group[name] for name in NUMBERS if name in group] + list(group.get("betas", ()))
    if not all(isinstance(number, int | float) for number in numbers):
        found.append("a coefficient other than the learning rate is a tensor")
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.dtype not in (torch.float32, torch.float64):
        found.append(f"the learning rate is a tensor of {lr.dtype}")
    return found
