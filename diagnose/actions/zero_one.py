"""Each rank keeps the optimizer's state of its share of the parameters"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import distributed, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from diagnose.actions._optimizers import fit_optimizers, hooks_on, parameters_of
from diagnose.actions._zero_shares import Shares
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.kernels._swap import COPIED

CLASSES = (
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.Adamax,
    optim.AdamW,
    optim.ASGD,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Those whose step of one parameter looks at no other."""

BACKENDS = ("gloo", "nccl")


class ZeroOne(Action):
    """
    ## What it does
    Deals the parameters of each optimizer out to the ranks of a DDP job (ZeRO, stage 1). A rank keeps the
    state of its share only, steps that share, and gets the other parameters from the ranks that have
    stepped them: with two ranks half the state and half the arithmetic of the step, unless one parameter,
    which is not cut, is most of the model. Parameters, gradients and the loop stay as they are. Undone,
    each rank has all of the state again.

    ## When it takes effect
    At the next step.

    ## When it cannot help
    A job of one process; SGD without momentum, which keeps no state; other optimizers than torch's own, and
    LBFGS, which looks at all parameters at once. It is refused where weights or states differ between the
    ranks, because there its result would be another. No rule asks for it yet: name it with `--only`. It
    then stays for the memory that it frees, unless steps take twice as long.

    ## Hazards
    Each step sends all parameters once more. A checkpoint is whole, whichever ranks ask for
    `optimizer.state_dict()`, or copy the optimizer: what a rank lacks it asks the others for, who answer
    beside their own work. What comes from them lies in the host's memory. A script that looks into
    `optimizer.state` itself finds this rank's share. Before each step the ranks wait for each other: where
    one leaves its loop early, and the others go on without DDP, they wait in vain. An optimizer that the
    script drops is kept to the end, with its parameters: ranks may still ask each other for it.

    ## What was measured
    Weights and states equal bit for bit on two ranks over gloo and on four, with eleven optimizers. Not run
    on GPUs yet.
    """

    safety = Safety.EXACT
    touches = "ranks"
    frees_memory = True
    order = 60
    excludes = frozenset({"autocast-fp16", "eight-bit-states", "fused-optimizer", "optimizer-in-backward"})

    def check(self, job: Job) -> None:
        shareable(job)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        optimizers, group = shareable(job)
        with ExitStack() as stack:
            shares = [Shares(optimizer, group) for optimizer in optimizers]
            for each in shares:
                stack.enter_context(each.ready())
            yield shares

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for each in prepared:
                stack.enter_context(each.in_force())
            yield

    def state(self, job: Job) -> Any:
        kinds = ("step_pre", "step_post", "state_dict_post", "load_state_dict_post")
        return [(hooks_on(each, *kinds), COPIED in vars(each)) for each in job.optimizers]


def shareable(job: Job) -> tuple[list[Optimizer], Any]:
    """Returns the optimizers whose state can be shared, and the process group.

    Raises:
        CannotApply: If there is none.
    """
    models = [model for model in job.models if isinstance(model, DistributedDataParallel)]
    if not models:
        raise CannotApply("no model of the loop is wrapped in DistributedDataParallel")
    group = models[0].process_group
    if any(model.process_group is not group for model in models):
        raise CannotApply("models are averaged in different process groups")
    if group.size() < 2 or group.size() != distributed.get_world_size():
        raise CannotApply(
            f"the model is averaged over {group.size()} of {distributed.get_world_size()} ranks"
        )
    if (backend := distributed.get_backend(group)) not in BACKENDS:
        raise CannotApply(f"the ranks are joined by {backend}, not by {' or '.join(BACKENDS)}")
    if not distributed.is_gloo_available() or not hasattr(distributed, "_broadcast_coalesced"):
        raise CannotApply("this torch has no gloo, or no torch.distributed._broadcast_coalesced")
    if any(model._join_config.enable for model in models):
        raise CannotApply("the script joins ranks that have different numbers of batches")
    averaged = {id(p) for model in models for p in model.parameters() if p.requires_grad}
    return fit_optimizers(job, lambda optimizer: _why_not(optimizer, averaged)), group


def _why_not(optimizer: Optimizer, averaged: set[int]) -> str:
    name, groups = type(optimizer).__name__, optimizer.param_groups
    params = [p for p in parameters_of(optimizer) if p.requires_grad]
    if type(optimizer) not in CLASSES:
        return f"{name} may look at several parameters at once, or keep its state elsewhere"
    if any(group.get("differentiable") or group.get("capturable") for group in groups):
        return f"{name} is differentiable, or part of a graph"
    if not {id(p) for p in params} <= averaged:
        return "the optimizer has parameters that DistributedDataParallel does not average"
    if len({p.device for p in params}) != 1:
        return "parameters lie on several devices"
    held = [v for p in params for v in optimizer.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
    if not any(v.numel() > 1 for v in held):
        return f"{name} keeps no state here"
    if any(v.dim() and v.device != params[0].device for v in held):
        return "states lie on another device than parameters"
    return ""
