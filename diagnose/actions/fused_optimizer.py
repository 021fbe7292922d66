"""One call updates all parameters"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from diagnose.actions._fused_step import CHECKED, implementation, is_fused, tensors_together, why_not
from diagnose.actions._gone import entered
from diagnose.actions._optimizers import fit_optimizers, hooks_on, parameters_of
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._fusing import CLASSES, momenta, why_not_fused, why_sparse
from diagnose.kernels._clip import CLIPPING
from diagnose.kernels._layout import fits
from diagnose.kernels._swap import COPIED, support

MIN_ELEMENTS = 100_000
"""Of fewer no step takes a tenth of a millisecond: without a finding a trial would not be worth it."""

LATE = (
    "fused=True of SGD has to be left out: torch's raises an exception where a parameter gets its first"
    " gradient in a later step than others, as those of a part do that is frozen at first"
)


class FusedOptimizer(Action):
    """
    ## What it does
    Lets a fused implementation step each Adam, AdamW, SGD and Adagrad of the loop: one call updates all
    tensors, instead of ten calls for each. On an NVIDIA GPU this is one kernel launch of our own, which
    also serves optimizers that torch fuses already, and gradients are clipped in two. On a CPU, and for
    what our kernels do not know, it is torch's fused step. State and checkpoints stay as the script's own
    implementation has them, and loading a checkpoint does not end it.

    ## When it takes effect
    At the next step.

    On a CPU, and where our own kernels can step an optimizer, it is tried also where nothing was found:
    what it saves depends on the size of the tensors, the threads, the memory and the clipping, and is seen
    in no reading.

    ## When it cannot help
    Other classes and subclasses of these, a differentiable or capturable optimizer, sparse gradients. On a
    GPU, a fused step of torch's of few large tensors, without clipping, is bound by memory already.

    ## Hazards
    Where torch's fused step is used, a step in which a gradient lies in memory in another order than its
    parameter is left to the script's own implementation; this is looked at in the first steps and every
    fiftieth one. Our kernels look at every step, and leave such a parameter alone to it. They are compiled
    at first use, in less than a second, and then kept on the disk.
    """

    safety = Safety.ROUNDING
    touches = "optimizer"
    hangs_on = ("optimizers",)
    unasked = True

    def check(self, job: Job) -> None:
        _eligible(job)

    def check_unasked(self, job: Job) -> None:
        eligible = _eligible(job)
        if job.device != "cpu" and all(map(support, eligible)):
            raise CannotApply(
                "on a device it is tried where kernels of ours step, or the rules find a slow one"
            )
        if sum(p.numel() for each in eligible for p in parameters_of(each)) < MIN_ELEMENTS:
            raise CannotApply(f"the optimizer updates fewer than {MIN_ELEMENTS:,} elements")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[list[list[str]]]:
        """See `Action.prepare`: yields a list of what has failed, which `apply` fills."""
        yield []

    @contextmanager
    def apply(self, job: Job, prepared: list[list[str]]) -> Iterator[None]:
        with ExitStack() as stack:
            prepared += entered(stack, (implementation(each)(each) for each in _eligible(job)))
            yield

    def why_not_stay(self, prepared: list[list[str]]) -> str:
        """See `Action.why_not_stay`: where kernels step on one rank only, replicas drift."""
        return next(chain(*prepared), CLIPPING.why_broken())

    def state(self, job: Job) -> Any:
        return [_state(optimizer) for optimizer in job.optimizers]

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        """See `Action.settings`: a key names all of a class, so torch must be able to fuse each of them, in
        every step: in the script nobody leaves one to torch's other implementations."""
        served = [each for each in job.optimizers if not _why_not(job, each) and not is_fused(each)]
        unfit = {type(each) for each in job.optimizers if why_not_fused(each, job.models)}
        unfit |= {type(each) for each in served if not all(map(fits, tensors_together(each)))}
        settings: dict[str, str] = {}
        if job.facts.get("late_momenta") or not all(chain(*map(momenta, job.optimizers))):
            unfit.add(SGD)
            if any(type(each) is SGD for each in served):
                settings["note"] = LATE
        settings |= {f"{type(each).__name__}.fused": "True" for each in served if type(each) not in unfit}
        return settings


def _eligible(job: Job) -> list[Optimizer]:
    return fit_optimizers(job, partial(_why_not, job))


def _why_not(job: Job, optimizer: Optimizer) -> str:
    sparse = type(optimizer) in CLASSES and why_sparse(optimizer, job.models)
    return sparse or why_not(optimizer)


def _state(optimizer: Optimizer) -> dict[str, Any]:
    if type(optimizer) not in CLASSES:
        return {}
    return {
        "class": type(optimizer).__name__,
        "flags": [(group["fused"], group["foreach"]) for group in optimizer.param_groups],
        "hooks": hooks_on(optimizer, "step_pre", "step_post", "state_dict_post"),
        "checked": vars(optimizer).get(CHECKED),
        "copied": COPIED in vars(optimizer),
        "devices of steps": {
            str(state["step"].device)
            for state in optimizer.state.values()
            if isinstance(state.get("step"), torch.Tensor)
        },
    }
