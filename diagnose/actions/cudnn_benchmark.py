"""cuDNN tries its convolutions and takes the fastest"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.conv import _ConvNd

from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

STATEMENT = "torch.backends.cudnn.benchmark = True"


class CudnnBenchmark(Action):
    """
    ## What it does
    Sets `torch.backends.cudnn.benchmark`: for each new shape cuDNN runs all of its algorithms once and
    keeps the fastest, instead of guessing.

    ## When it takes effect
    At the first convolution of each shape, which is slow. torch keeps what it has chosen for a shape, by
    guessing too, and looks no further when this is set later: on a running job it does nothing, so there is
    no trial. Set it in the script, before the loop; or name it in the file of `diagnose run --apply`, which
    puts it in force before the script's first step and, as it cannot be taken back, does not measure it.

    ## When it cannot help
    A model without convolutions, a loop whose shapes change all the time, a CPU.

    ## Hazards
    Another algorithm rounds otherwise, and the choice may differ from run to run. Some algorithms take more
    memory.

    ## What was measured
    Nothing yet: no run on a GPU has tried it.
    """

    safety = Safety.ROUNDING
    settle_steps = 3
    touches = "model"
    at_start = True

    def check(self, job: Job) -> None:
        """See `Action.check`. Before the first step nobody knows the models."""
        cudnn = torch.backends.cudnn
        if not cudnn.is_available() or (job.models and job.device != "cuda"):
            raise CannotApply("the model does not run on cuDNN")
        if cudnn.deterministic or torch.are_deterministic_algorithms_enabled():
            raise CannotApply("the script asks for deterministic algorithms")
        if cudnn.benchmark:
            raise CannotApply("it is set already")
        modules = [module for model in job.models for module in model.modules()]
        if modules and not any(isinstance(module, _ConvNd) for module in modules):
            raise CannotApply("no model has a convolution")
        if job.steps:
            kept = "torch keeps the algorithm it chose for a shape"
            raise CannotApply(f"{kept}: put {STATEMENT} before the first step")

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        before = torch.backends.cudnn.benchmark
        try:
            torch.backends.cudnn.benchmark = True
            yield
        finally:
            torch.backends.cudnn.benchmark = before

    def state(self, job: Job) -> Any:
        return torch.backends.cudnn.benchmark

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"statement": STATEMENT}
