"""The model computes in fp16, with its loss scaled"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from diagnose.actions._autocast import on_its_gpu, refuse_lower_precision, refuse_slower, under_autocast
from diagnose.actions._careful import Careful, Failure
from diagnose.actions._gone import entered
from diagnose.actions._loss_scale import LossScale, refuse_hooked
from diagnose.actions._optimizers import hooks_on
from diagnose.actions._routes import (
    models_with_weights,
    refuse_compiled,
    routed,
    routes_in_force,
)
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class AutocastFp16(Action):
    """
    ## What it does
    Runs the model's forward pass in training under `torch.autocast` with fp16, and hands its outputs back
    as float32. Small gradients would vanish in fp16, so they are multiplied on their way into the model and
    divided on their way out: every gradient that the script sees, clips or logs is the true one. A step
    with a gradient that is not finite is left out, on all ranks alike, and the factor halved, as
    `GradScaler` does.

    ## When it takes effect
    At the next call of the model.

    ## When it cannot help
    A model that is not bound by products of matrices or convolutions; a script that uses autocast, a
    scaler, low-precision weights or quantization already, or has hooks on parameters, which would get the
    multiplied gradients; a CPU.

    ## Hazards
    A loop that steps with a closure cannot skip the step, and one that uses parameters outside the model,
    as a penalty on weights does, gets gradients that were never multiplied: both are noticed when they
    happen, gradients are then computed without the factor, and the action is off for good. With several
    ranks a step is made whose overflow the script has hidden by clipping values.
    """

    safety = Safety.PRECISION
    order = 41
    excludes = frozenset({"autocast-bf16"})
    touches = "model"
    hangs_on = ("models", "optimizers")

    def check(self, job: Job) -> None:
        if job.device != "cuda":
            raise CannotApply("fp16 is for GPUs; the model is on another device")
        if len({p.device for model in job.models for p in model.parameters()}) > 1:
            raise CannotApply("the model is spread over several devices, and the factor is on one")
        check_loop(job)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        failure = Failure()
        with on_its_gpu(job):
            refuse_slower(job.device, torch.float16)
            scale = LossScale(job.device, failure)
        yield failure, scale

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        failure, scale = prepared
        failure.refuse_again()
        route = scale.through(under_autocast(job.device, torch.float16))

        def careful() -> Careful:
            return Careful(route, failure, lambda: scale.give_up(failure.reason))

        with ExitStack() as stack:
            stack.enter_context(scale.installed(models_with_weights(job), list(job.optimizers)))
            entered(stack, (routed(job, each, careful()) for each in models_with_weights(job)))
            yield

    def state(self, job: Job) -> Any:
        params = [p for model in job.models for p in model.parameters()]
        hooks = [len(p._backward_hooks or ()) for p in params]
        steps = [hooks_on(each, "step_pre", "step_post") for each in job.optimizers]
        return routes_in_force(job), hooks, steps, torch.autograd.backward


def check_loop(job: Job) -> None:
    """Looks whether loss scaling fits the loop, whatever the device.

    Raises:
        CannotApply: If it does not.
    """
    refuse_lower_precision(job)
    refuse_compiled(job)
    refuse_hooked(p for model in job.models for p in model.parameters())
    if not hasattr(torch, "_amp_foreach_non_finite_check_and_unscale_"):
        raise CannotApply("this torch has no torch._amp_foreach_non_finite_check_and_unscale_")
    for optimizer in job.optimizers:
        if not type(optimizer).__module__.startswith("torch.optim."):
            raise CannotApply(f"{type(optimizer).__name__} is not torch's: its steps may not be skippable")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise CannotApply("LBFGS calls the model several times in one step, which cannot be skipped")
