"""By how much the learning rate grows where a step learns from more samples than a step of the script's."""

from __future__ import annotations

import math
from typing import Any
from weakref import ref

from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from diagnose.actions._optimizers import parameters_of
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job

LINEAR = (SGD,)
"""A step is as long as its gradient: one on k times the samples stands for k steps (Goyal et al., 2017)."""

ROOT = (Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop)
"""A step is as long as the rate, whatever the gradient: what k steps of noise come to grows with the root
(Malladi et al., 2022)."""

RAMP_STEPS = 100
"""The rate grows over so many steps after the batch did: a leap can make training diverge."""


def refuse_without_rule(job: Job) -> None:
    """Raises `CannotApply` if nobody knows a learning rate for larger batches."""
    if not job.optimizers:
        raise CannotApply("no optimizer has stepped")
    for optimizer in job.optimizers:
        kind = type(optimizer)
        if kind not in (*LINEAR, *ROOT):  # a subclass may compute anything
            raise CannotApply(
                f"no rule says what learning rate {kind.__qualname__} needs for larger batches"
            )
        if any(group.get("capturable") for group in optimizer.param_groups):
            raise CannotApply(f"{kind.__qualname__} is capturable: a CUDA graph may hold its learning rate")
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise CannotApply(f"{kind.__qualname__} is to be differentiated itself")
        if any(hasattr(p, "_local_tensor") for p in parameters_of(optimizer)):
            raise CannotApply("parameters are spread over ranks")


class Rate:
    """The learning rate of one optimizer: ours during a step, the script's at all other times.

    So schedulers, logs and checkpoints see what they would see without us.

    Args:
        optimizer: One that `refuse_without_rule` lets pass.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = ref(optimizer)
        self._linear = type(optimizer) in LINEAR
        self._steps = 0
        self._theirs: list[tuple[dict[str, Any], Any, Any]] = []

    def factor(self, growth: float) -> float:
        """Returns what the rate is multiplied with now.

        Args:
            growth: How many times the script's own samples the step learns from; at least 1.
        """
        full = growth if self._linear else math.sqrt(growth)
        return 1 + (full - 1) * min(1.0, self._steps / RAMP_STEPS)

    def grow(self, growth: float) -> None:
        """A step begins."""
        self._steps += 1
        factor = self.factor(growth)
        for group in getattr(self._optimizer(), "param_groups", ()):
            ours = group["lr"] * factor
            self._theirs.append((group, group["lr"], ours))
            group["lr"] = ours

    def restore(self) -> None:
        """The step is over, or has failed."""
        for group, theirs, ours in self._theirs:
            if group["lr"] is ours:
                group["lr"] = theirs
        self._theirs.clear()
