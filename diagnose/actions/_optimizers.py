"""What actions on optimizers ask of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job


def fit_optimizers(job: Job, why_not: Callable[[Optimizer], str]) -> list[Optimizer]:
    """Returns the optimizers of a job that are fit for something.

    Args:
        why_not: Says why one is not, in words; empty if it is.

    Raises:
        CannotApply: If none is.
    """
    reasons = [(optimizer, why_not(optimizer)) for optimizer in job.optimizers]
    found = [optimizer for optimizer, reason in reasons if not reason]
    if not found:
        raise CannotApply(reasons[0][1] if reasons else "no optimizer has stepped")
    return found


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Returns the parameters of all groups, in the order in which torch numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def hooks_on(optimizer: Optimizer, *kinds: str) -> list[list[int]]:
    """Returns the keys of an optimizer's hooks of some kinds, such as `step_pre`, for `Action.state`."""
    return [list(getattr(optimizer, f"_optimizer_{kind}_hooks")) for kind in kinds]
