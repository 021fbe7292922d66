"""Gradients of micro-batches are averaged over the ranks once a step"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch.optim.optimizer import _global_optimizer_pre_hooks, register_optimizer_step_pre_hook

from diagnose.actions._ddp import wrapped
from diagnose.actions._ddp_accumulation import SAME_STEPS, Accumulation
from diagnose.actions._routes import routed
from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._looks import added


class NoSync(Action):
    """
    ## What it does
    Where a script accumulates the gradients of several batches and DDP averages them after each, leaves out
    all averages but the last, as the script would with `model.no_sync()`. How many batches make a step
    is learnt from three steps. A step that comes earlier is averaged just before the optimizer. Buffers,
    such as those of batch norm, go to all ranks as often as ever.

    ## When it takes effect
    With the fifth step after it was prepared.

    ## When it cannot help
    A script that takes one batch per step, or that uses `no_sync` itself. It is refused where parameters or
    gradients are changed between two batches of a step, as by sharpness-aware minimization or by clipping
    each batch: then the averages cannot wait. And where ranks have different numbers of batches.

    ## Hazards
    The sum of averages is rounded in another order than the average of sums. A script that reads gradients
    between two batches sees its own rank's. If it comes to change them later on, that is found out and the
    fix undone within some hundred steps; those trained on what each rank had by itself. Where a step comes
    earlier than usual in a loop of unknown length, gradients are clipped before they are averaged, in that
    one step; the end of an epoch is known.
    """

    safety = Safety.ROUNDING
    order = 50
    excludes = frozenset({"static-graph"})
    touches = "ranks"
    learning_steps = SAME_STEPS + 1
    hangs_on = ("models",)

    def check(self, job: Job) -> None:
        models = wrapped(job)
        if len(models) > 1 or len(job.optimizers) > 1:
            raise CannotApply(
                "several models or optimizers take turns: which pass is a step's last is unclear"
            )
        if models[0].find_unused_parameters or models[0].static_graph:
            raise CannotApply("find_unused_parameters or static_graph expect every pass to be averaged")
        if (job.facts.get("ddp", {}).get("synced_share") or 1.0) < 1:
            raise CannotApply("the script leaves out averages itself")
        if job.steps and job.backward_passes < 1.5 * job.steps:
            raise CannotApply("each step takes one batch")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """See `Action.prepare`: begins to count."""
        model = wrapped(job)[0]
        accumulation = Accumulation(job, model)
        with (
            added(job.on_step, accumulation.stepped),
            added(job.on_iterator, accumulation.begins),
            routed(job, model, accumulation.route),
        ):
            del model
            yield accumulation

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        if prepared.reason:
            raise CannotApply(prepared.reason)
        if not prepared.passes or prepared.unclear:
            raise NotYet("its last steps did not take the same number of passes")
        with ExitStack() as stack:
            # Also before those of an optimizer that the script makes later on: it may take fewer batches.
            stack.callback(register_optimizer_step_pre_hook(prepared.average).remove)
            stack.callback(setattr, prepared, "leaves_out", False)
            prepared.leaves_out = True
            yield

    def why_not_stay(self, prepared: Any) -> str:
        return str(prepared.reason)

    def alike(self, prepared: Any) -> str:
        """See `Action.alike`: where an epoch ends, all averages are made."""
        return str(prepared.alike)

    def state(self, job: Job) -> Any:
        """See `Action.state`. Counting is no part of it."""
        counting = [_ours(call) for call in job.on_step]
        hooks = map(_ours, _global_optimizer_pre_hooks.values())
        return [each for each in counting if each is not None and each.leaves_out], [
            each for each in hooks if each is not None
        ]

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"advice": "with model.no_sync(): ...  # around all but the last batch of a step"}


def _ours(call: Any) -> Accumulation | None:
    owner = getattr(call, "__self__", None)
    return owner if isinstance(owner, Accumulation) else None
