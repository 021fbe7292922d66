"""AdamW keeps its moments in one byte each"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

from torch.optim import Optimizer

from diagnose.actions._eight_bit_step import in_bytes, why_not
from diagnose.actions._gone import entered
from diagnose.actions._optimizers import fit_optimizers, hooks_on
from diagnose.actions.base import Action
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.kernels._swap import COPIED


class EightBitStates(Action):
    """
    ## What it does
    Keeps both moments of each AdamW of the loop in one byte per element, with a scale for every 256: two
    bytes and a little for each parameter instead of eight. A kernel of our own decodes, steps and codes
    again in one launch. Checkpoints hold the moments as torch's AdamW does, and load into it; one that is
    loaded meanwhile is coded.

    ## When it takes effect
    At the next step.

    ## When it cannot help
    Other optimizers than AdamW itself, and one with `amsgrad`. It needs an NVIDIA GPU, and saves memory of
    the state only: a step is shorter where that has many bytes to read.

    ## Hazards
    Each step rounds the moments: the first to a 32nd of itself, the root of the second to a 64th, what is
    less than 2^-12 of the largest in its 256 more coarsely. Training takes another way, hence
    `--allow training`, and the loss is watched. Undone, the moments stay what the codes tell.
    """

    safety = Safety.TRAINING
    order = 60
    excludes = frozenset({"fused-optimizer", "optimizer-in-backward", "autocast-fp16"})
    settle_steps = 2
    hangs_on = ("optimizers",)

    def check(self, job: Job) -> None:
        fit_optimizers(job, why_not)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[list[list[str]]]:
        """See `Action.prepare`: yields a list of what has failed, which `apply` fills."""
        yield []

    @contextmanager
    def apply(self, job: Job, prepared: list[list[str]]) -> Iterator[None]:
        with ExitStack() as stack:
            prepared += entered(stack, map(in_bytes, fit_optimizers(job, why_not)))
            yield

    def why_not_stay(self, prepared: list[list[str]]) -> str:
        """See `Action.why_not_stay`: where kernels step on one rank only, replicas drift."""
        return next(chain(*prepared), "")

    def state(self, job: Job) -> Any:
        return [_state(optimizer) for optimizer in job.optimizers]


def _state(optimizer: Optimizer) -> dict[str, Any]:
    return {
        "hooks": hooks_on(optimizer, "step_pre", "state_dict_post", "load_state_dict_post"),
        "copied": COPIED in vars(optimizer),
        "kept": sorted({name for state in optimizer.state.values() for name in state}),
    }
