"""Optimizers of other libraries that compute what a kernel does: known by their exact class and settings.

They are not imported, nor needed: a class is told by its name, and one with a setting that is not known
here may compute anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from diagnose.kernels._algorithms import LION, Algorithm
from torch.optim import Optimizer

_SCHEDULERS = {"params", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
"""What schedulers of torch's keep in a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """A class of another library.

    Attributes:
        algorithm: What it computes.
        settings: Of its groups, all that are known.
        why_not: From the optimizer and a group to what of it no kernel does, in words; empty if nothing.
    """

    algorithm: Algorithm
    settings: frozenset[str]
    why_not: Callable[[Optimizer, Mapping[str, Any]], str]


def _lion_pytorch_lacks(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    return (
        "its weight decay is divided by its first rate" if getattr(optimizer, "decoupled_wd", True) else ""
    )


def _timm_lion_lacks(optimizer: Optimizer, group: Mapping[str, Any]) -> str:
    if group["caution"]:
        return "it is cautious"
    return "its weight decay is corrected by its largest rate" if group["corrected_weight_decay"] else ""


_LION_SETTINGS = {"lr", "betas", "weight_decay"}

_KNOWN = {
    ("lion_pytorch.lion_pytorch", "Lion"): Foreign(
        algorithm=LION, settings=frozenset(_LION_SETTINGS), why_not=_lion_pytorch_lacks
    ),
    ("timm.optim.lion", "Lion"): Foreign(
        algorithm=LION,
        settings=frozenset(
            _LION_SETTINGS
            | {"maximize", "foreach", "caution", "corrected_weight_decay", "max_lr_snapshot", "lr_scale"}
        ),
        why_not=_timm_lion_lacks,
    ),
}


def foreign(optimizer: Optimizer) -> Foreign | None:
    """What is known of an optimizer's class, if it is another library's."""
    kind = type(optimizer)
    return _KNOWN.get((kind.__module__, kind.__qualname__))


def foreign_refusals(optimizer: Optimizer) -> list[str]:
    """Why kernels cannot do what this optimizer of another library does, in words."""
    known = foreign(optimizer)
    if known is None:
        return []
    found = []
    for group in optimizer.param_groups:
        unknown = sorted(set(group) - known.settings - _SCHEDULERS)
        if unknown:
            found.append(f"it has settings that its kernel does not know: {', '.join(unknown)}")
        else:
            found.append(known.why_not(optimizer, group))
    return [reason for reason in dict.fromkeys(found) if reason]
