"""Whether torch has a fused step that does what an optimizer's own does."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

CLASSES = (Adam, AdamW, SGD, Adagrad)
"""Those that torch can fuse; a subclass may compute anything."""


def why_not_fused(optimizer: Optimizer, models: Iterable[torch.nn.Module] = ()) -> str:
    """Returns why `fused=True` would not do, in words; empty if it would, or is set already.

    Args:
        optimizer: The optimizer.
        models: What it trains, as far as that is known: layers tell whether their gradients are sparse.
    """
    from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

    name, groups = type(optimizer).__name__, optimizer.param_groups
    params = [p for group in groups for p in group["params"]]
    devices = {p.device.type for p in params}
    if type(optimizer) not in CLASSES:
        return f"torch has no fused {name}"
    if any(group.get("differentiable") for group in groups):
        return f"{name} is differentiable, which a fused step is not"
    if len(devices) != 1 or not devices <= set(_get_fused_kernels_supported_devices()):
        return f"torch has no fused step on {' and '.join(sorted(devices))}"
    if type(optimizer) is Adagrad and devices == {"cuda"} and not adagrad_fuses_on_cuda():
        return "this torch has no fused Adagrad on cuda"
    if any(type(p) not in (torch.nn.Parameter, torch.Tensor) for p in params):
        return "some parameters are of a class of their own"
    if not all(p.is_floating_point() for p in params):
        return "some parameters are not floating-point numbers"
    if type(optimizer) is SGD and devices == {"cpu"} and any(p.element_size() == 2 for p in params):
        # Measured with torch 2.13: tensors of 16 elements and more stay as they are, without a word.
        return "torch's fused SGD does not update 16-bit parameters on a CPU"
    steps = [state["step"] for state in optimizer.state.values() if "step" in state]
    if not all(isinstance(step, torch.Tensor) and step.dtype is torch.float32 for step in steps):
        return "some parameters count their steps in another type than float32"
    return why_sparse(optimizer, models)


def adagrad_fuses_on_cuda() -> bool:
    """Whether this torch does: 2.11 has the step refuse it, by an argument to the check that it calls."""
    code = getattr(Adagrad._init_group, "__code__", None)
    constants = code.co_consts if code is not None else ()
    return not any("cuda_unsupported" in names for names in constants if isinstance(names, tuple))


def momenta(optimizer: Optimizer) -> list[bool]:
    """Returns, for each parameter that an SGD steps with a momentum, whether it has its own yet.

    Where some have and others get theirs in a later step, as those of a part that is frozen at first,
    torch's fused step raises an exception (`torch.optim.sgd._fused_sgd`); its others do not.
    """
    state, groups = optimizer.state, optimizer.param_groups if isinstance(optimizer, SGD) else ()
    return [
        state.get(p, {}).get("momentum_buffer") is not None
        for group in groups
        if group["momentum"]
        for p in group["params"]
    ]


def why_sparse(optimizer: Optimizer, models: Iterable[torch.nn.Module]) -> str:
    """Returns which layer gives an optimizer sparse gradients, in words; empty if none does."""
    params = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for model in models:
        for module in model.modules():
            if getattr(module, "sparse", False) is True and id(getattr(module, "weight", None)) in params:
                return f"{type(module).__name__} has sparse gradients"
    return ""
