"""Time in what surrounds an optimizer step: clearing, unscaling and clipping gradients, and the
schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from diagnose.core.ledger import FIRST_GAP, OPTIMIZER
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, charged, replaced, replaced_in, spanned

CLIPPING = (
    "clip_grad_norm_",
    "clip_grad_norm",
    "clip_grad_value_",
    "clip_grads_with_norm_",
    "get_total_norm",
)


class OptimizerRestHook(Hook):
    """Charges `zero_grad`, `clip_grad_*` and every scheduler's `step` to `optimizer`, and remembers from
    which lines schedules are stepped.

    Torch has no process-wide hooks for these. A script that imported `clip_grad_norm_` by name before a
    late `attach()` keeps the original; under `diagnose run` the hook is there first.
    """

    requires = "torch.optim.lr_scheduler"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch
        from torch.nn.utils import clip_grad
        from torch.optim import lr_scheduler

        def wrap(original: Any) -> Any:
            return charged(original, recorder, OPTIMIZER)

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            if recorder.current < FIRST_GAP:
                return -1
            if recorder.curious:
                recorder.met.site("schedule")
            return OPTIMIZER

        def wrap_schedule(original: Any) -> Any:
            return spanned(original, recorder, before)

        schedulers = [
            value
            for value in vars(lr_scheduler).values()
            if isinstance(value, type)
            and "step" in vars(value)
            and value.__module__ == lr_scheduler.__name__
        ]
        with ExitStack() as stack:
            stack.enter_context(replaced(torch.optim.Optimizer, "zero_grad", wrap))
            stack.enter_context(replaced(torch.nn.Module, "zero_grad", wrap))
            for scheduler in schedulers:
                stack.enter_context(replaced(scheduler, "step", wrap_schedule))
            for name in CLIPPING:
                owners = [owner for owner in (clip_grad, torch.nn.utils) if hasattr(owner, name)]
                stack.enter_context(replaced_in(owners, name, wrap))
            yield
