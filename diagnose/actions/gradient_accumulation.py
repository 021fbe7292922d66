"""One optimizer step for several of the script's batches"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from diagnose.actions._grouped_steps import Epoch, GroupedSteps
from diagnose.actions._learning_rate import refuse_without_rule
from diagnose.actions._optimizers import hooks_on
from diagnose.actions._routes import routes_in_force
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._looks import added

SIZES = (2, 4)
"""Batches of the script's in one step. The more, the fewer steps there are to learn in: what goes further
is for the script's author to say."""


class GradientAccumulation(Action):
    """
    ## What it does
    Lets the optimizer step once for two or four of the script's batches, on the mean of their gradients:
    for models whose optimizer step costs much. The loop stays as it is: it clears, unscales and clips the
    gradients of each batch and calls `step()`, which only collects them until the group is whole. A group
    ends with its epoch, however many batches it has, also where the loop leaves it early; under DDP when
    the next one begins.

    The learning rate grows with the group: k times with SGD, the root of k times with Adam and its kind, in
    a ramp of 100 steps. It does so during the step alone: schedulers go on as before, by the script's
    batches, and logs show their rate. Momentum and weight decay are left as they are.

    ## When it takes effect
    At the next step. On leaving, the gradients that have been collected are stepped on.

    ## When it cannot help
    Where the optimizer takes a small part of the step. Under DDP gradients are exchanged after each batch,
    as the script has it.

    ## When it is refused
    For optimizers other than SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad and RMSprop, as no rule for
    the learning rate is known; for sparse gradients; for steps that are given a closure or are fused by the
    script and scaled by a `GradScaler`.

    ## Hazards
    Training takes fewer, longer steps: another training, hence `--allow training`, and tried only
    when named with `--only gradient-accumulation`. The loss is watched. A loop that counts steps counts its
    batches, as ever. Each batch counts alike, also a smaller one. It keeps one more gradient of each
    parameter.
    """

    safety = Safety.TRAINING
    excludes = frozenset({"optimizer-in-backward", "no-sync"})
    settle_steps = max(SIZES)
    window_steps = 2 * max(SIZES)
    period_steps = max(SIZES)
    hangs_on = ("optimizers",)

    def check(self, job: Job) -> None:
        refuse_without_rule(job)

    def values(self, job: Job) -> Sequence[int | None]:
        return SIZES

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """See `Action.prepare`: makes room for the sums."""
        self.check(job)
        # Ranks may have different numbers of batches, and must step together.
        together = any(isinstance(model, DistributedDataParallel) for model in job.models)
        grouped: list[GroupedSteps] = []
        epoch = Epoch(job, lambda: _epoch_is_over(grouped), left=not together)
        ends = (lambda: False) if together else epoch.ends
        grouped += [GroupedSteps(optimizer, ends, alone=not together) for optimizer in job.optimizers]
        with added(job.on_iterator, epoch.begins):
            yield value or SIZES[0], grouped

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        size, grouped = prepared
        with ExitStack() as stack:
            for steps in grouped:
                if steps.refused:
                    raise CannotApply(steps.refused)
                stack.enter_context(steps.installed(size, job))
            yield

    def why_not_stay(self, prepared: Any) -> str:
        return next((steps.refused for steps in prepared[1] if steps.refused), "")

    def state(self, job: Job) -> Any:
        hooks = [hooks_on(each, "step_pre", "step_post", "state_dict_pre") for each in job.optimizers]
        return hooks, routes_in_force(job)


def _epoch_is_over(grouped: list[GroupedSteps]) -> None:
    for steps in grouped:
        steps.epoch_is_over()
