"""The model computes in bf16 where that is safe"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from diagnose.actions._autocast import on_its_gpu, refuse_lower_precision, refuse_slower, under_autocast
from diagnose.actions._careful import Careful, Failure
from diagnose.actions._routes import all_routed, refuse_compiled, routes_in_force
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

TENSOR_CORES = (8, 0)
"""The first compute capability whose tensor cores know bf16."""


class AutocastBf16(Action):
    """
    ## What it does
    Runs the model's forward pass in training under `torch.autocast` with bf16, and hands its outputs back
    as float32, so that the loss and the rest of the loop compute as before. Weights, gradients and the
    optimizer stay float32. bf16 has the range of float32, so no loss needs scaling. Before a trial, matrix
    products are timed in both types; where bf16 does not win, nothing is tried.

    ## When it takes effect
    At the next call of the model.

    ## When it cannot help
    A model that is not bound by products of matrices or convolutions, hardware without bf16 units, a script
    that uses autocast, low-precision weights or quantization already. Evaluation stays in float32.

    ## Hazards
    bf16 has three decimal digits. An operation that cannot run under autocast makes the model run once more
    without, random numbers and buffers as they were, and the action is off for good.
    """

    safety = Safety.PRECISION
    order = 40
    excludes = frozenset({"autocast-fp16"})
    touches = "model"
    hangs_on = ("models",)

    def check(self, job: Job) -> None:
        refuse_lower_precision(job)
        refuse_compiled(job)
        if job.device not in ("cpu", "cuda"):
            raise CannotApply(f"autocast with bf16 has been tried on CPUs and CUDA only, not {job.device}")
        if job.device == "cuda" and torch.cuda.get_device_capability(job.torch_device) < TENSOR_CORES:
            raise CannotApply("this GPU has no units for bf16")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        with on_its_gpu(job):
            refuse_slower(job.device, torch.bfloat16)
        yield Failure()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        prepared.refuse_again()
        route = under_autocast(job.device, torch.bfloat16)
        with all_routed(job, lambda model: Careful(route, prepared)):
            yield

    def state(self, job: Job) -> Any:
        return routes_in_force(job)
