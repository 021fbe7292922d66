"""Gradients of matrices travel as products of two thin ones"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from diagnose.actions._ddp import TORCHS, GradientHook, Reduce, in_float32, wrapped
from diagnose.actions._ddp_low_rank import RANK, LowRank, is_worth_it
from diagnose.actions._ddp_rounds import InRounds
from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class DdpPowerSgdHook(GradientHook):
    """
    ## What it does
    Gives DDP a fresh reducer with a communication hook for PowerSGD: of the gradient of each weight matrix
    (of a convolution, too) only the best approximation of rank 4 is averaged, as two thin matrices; a layer
    of 1024 by 1024 sends a 128th. What the approximation leaves is added to the gradient of the next step.
    Biases and small matrices are averaged as they are.

    ## When it takes effect
    With the next step.

    ## When it cannot help
    A link that is no bottleneck: each step multiplies every gradient three times with a thin matrix.

    ## Hazards
    Training takes another way, hence `--allow training`, and the loss is watched. What has not been sent is
    kept while the trial switches it off, and is lost when it is taken out. It takes memory for all
    gradients twice more. Torch's own hook is not used: over gloo it begins collectives in threads, in an
    order that differs between ranks, which ends the process; it sets the seed of every GPU; and a gradient
    of zeros makes all that follow no numbers. Here collectives begin in the backward pass, in one order.
    """

    safety = Safety.TRAINING
    copies = 2
    torchs = (  # which needs NCCL
        f"{TORCHS}.powerSGD_hook.PowerSGDState(None, matrix_approximation_rank={RANK}),"
        f" {TORCHS}.powerSGD_hook.powerSGD_hook"
    )

    def check(self, job: Job) -> None:
        super().check(job)
        if not any(is_worth_it(p) for model in wrapped(job) for p in model.parameters() if p.requires_grad):
            raise CannotApply(f"no weight is large enough to be sent in {RANK} columns")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        yield WeakKeyDictionary({model: LowRank() for model in in_float32(job)})

    def reduce(self, model: Any, prepared: Any) -> Reduce:
        return InRounds("averaged_in_low_rank", prepared.setdefault(model, LowRank()).averaged)
