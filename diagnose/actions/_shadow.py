"""Computes one training step twice, with an action and without, beside the training.

The loss is in the script's code, out of reach between two steps. So the model is called on its latest
inputs, and into its output goes the gradient that the loss sent there last (see `_watch`): what then
arrives at the parameters is the same function of the model alone in both cases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from time import perf_counter_ns

import torch

from diagnose.actions._judge import Verdict, cannot_check, convolutions_in_full, judge, judge_update
from diagnose.actions._shadow_step import Result, Shadow
from diagnose.actions._shadow_update import ShadowUpdate
from diagnose.actions._untouched import CannotCheck
from diagnose.actions.base import CannotApply
from diagnose.core.errors import is_short_of_memory
from diagnose.core.job import Job
from diagnose.core.trial import Safety

TIMED = 3
"""Passes of which the fastest counts."""


def compare_gradients(job: Job, applied: AbstractContextManager[None], safety: Safety) -> Verdict:
    """Computes outputs, gradients and buffers of one step with a change and without.

    Nothing of the script's is different afterwards: generators, buffers, gradients, version counters.
    Costs two forward and backward passes, one more where convolutions may be TF32's, and up to two more
    where the results are not equal bit for bit.
    DDP's collectives do not run; a model with others of its own is not called.

    Args:
        job: The job, between two steps. Its `inputs` are used; with `_watch.watched` open since before the
            last step also the gradients that the loss sent.
        applied: The change, not yet made.
        safety: What the change promises.

    Raises:
        CannotApply: If the change cannot be made after all.
    """
    with job.unmeasured():
        try:
            shadows = [Shadow(job, model) for model in job.models if id(model) in job.inputs]
            own = [_computed(shadow) for shadow in shadows]
            if not any(result.gradients for result in own):
                return cannot_check("no call of a model with gradients was seen")
            try:
                with applied:
                    changed = [
                        shadow.compute(gradients=result.sent)
                        for shadow, result in zip(shadows, own, strict=True)
                    ]
                    with convolutions_in_full():
                        in_full = [
                            shadow.compute(gradients=result.sent) if shadow.tf32 else None
                            for shadow, result in zip(shadows, own, strict=True)
                        ]
            except (CannotApply, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 (what the script would have got)
                return _failed(error)
            verdicts = [
                judge(shadow, result, other, safety, full)
                for shadow, result, other, full in zip(shadows, own, changed, in_full, strict=True)
            ]
        except CannotApply:
            raise
        except Exception as error:  # noqa: BLE001 (what cannot be computed twice cannot be compared)
            return _uncompared(error, "compute a step twice")
    return _worst(verdicts)


def time_passes(
    job: Job, applied: AbstractContextManager[None], synchronize: Callable[[], None]
) -> tuple[int, int] | None:
    """Times forward and backward passes of the models beside the training, as `compare_gradients` makes
    them. Costs eleven passes, one more where a model was never called so.

    Args:
        job: The job, between two steps.
        applied: A change, not yet made.
        synchronize: Waits until the device has done what it was given.

    Returns:
        Nanoseconds of one pass without the change, and with it, each the fastest of a few; `None` where no
        passes can be made.

    Raises:
        CannotApply: If the change cannot be made after all.
    """
    with job.unmeasured():
        try:
            shadows = [Shadow(job, model) for model in job.models if id(model) in job.inputs]
            sent = [_computed(shadow).sent for shadow in shadows]
            if not any(sent):
                return None

            def fastest_ns() -> int:
                times = []
                for _ in range(TIMED):
                    synchronize()
                    begun = perf_counter_ns()
                    for shadow, gradients in zip(shadows, sent, strict=True):
                        shadow.compute(gradients=gradients)
                    synchronize()
                    times.append(perf_counter_ns() - begun)
                return min(times)

            without_ns = fastest_ns()
            with applied:
                for shadow, gradients in zip(shadows, sent, strict=True):
                    shadow.compute(gradients=gradients)  # the first time is dearer
                with_ns = fastest_ns()
            return min(without_ns, fastest_ns()), with_ns
        except CannotApply:
            raise
        except Exception:  # noqa: BLE001 (what cannot be computed beside the training cannot be timed)
            return None


def compare_update(job: Job, applied: AbstractContextManager[None], safety: Safety) -> Verdict:
    """Makes one step of each optimizer with a change and without, on copies; compares parameters and state.

    Nothing of the script's is different afterwards, and neither hooks nor schedulers hear of a step. The
    gradients are those that lie in `.grad` now, or made-up ones where the script has cleared them.

    Args:
        job: The job, between two steps.
        applied: The change, not yet made.
        safety: What the change promises.
    """
    with job.unmeasured():
        try:
            shadows = [ShadowUpdate(optimizer) for optimizer in job.optimizers]
            if not shadows:
                return cannot_check("no optimizer was seen")
            own = [shadow.step() for shadow in shadows]
            precise = [shadow.step(torch.float64) for shadow in shadows]
            try:
                with applied:
                    changed = [shadow.step() for shadow in shadows]
            except (CannotApply, torch.OutOfMemoryError):
                raise
            except Exception as error:  # noqa: BLE001 (likewise)
                return _failed(error)
            verdicts = [judge_update(*each, safety) for each in zip(own, precise, changed, strict=True)]
        except CannotApply:
            raise
        except Exception as error:  # noqa: BLE001 (what cannot be computed twice cannot be compared)
            return _uncompared(error, "make a step on copies")
    return _worst(verdicts)


def _uncompared(error: Exception, what: str) -> Verdict:
    if isinstance(error, torch.OutOfMemoryError):
        return cannot_check(f"there is too little memory to {what}")
    return cannot_check(error if isinstance(error, CannotCheck) else f"{type(error).__name__}: {error}")


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return min(verdicts, key=lambda verdict: (verdict.ok, verdict.allowed - verdict.error))


def _failed(error: Exception) -> Verdict:
    if is_short_of_memory(error):  # as cuDNN says it
        return cannot_check("there is too little memory to compute a step twice")
    return Verdict(ok=False, reason=f"with the action the step fails: {type(error).__name__}: {error}")


def _computed(shadow: Shadow) -> Result:
    """Computes the script's own step.

    Raises:
        CannotCheck: If the model's code does not let itself be called once more.
    """
    try:
        shadow.rehearse()
        return shadow.compute()
    except (CannotCheck, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the script's own code, called where the script does not call it
        raise CannotCheck(f"the model cannot be called twice: {type(error).__name__}: {error}") from error
