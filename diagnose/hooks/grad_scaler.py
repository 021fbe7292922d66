"""Time in gradient scaling, and steps that the scaler skips."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import OPTIMIZER
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import THEN, Hook, always, replaced, spanned


class GradScalerHook(Hook):
    """Charges `GradScaler.step`, `unscale_` and `update` to `optimizer`.

    When the gradients are not finite, `GradScaler.step` does not call the optimizer. To the script that was
    a step all the same, and so it is to the ledger.
    """

    requires = "torch.amp.grad_scaler"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        from torch.amp.grad_scaler import GradScaler

        def step_begins(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            recorder.work_begins(by_optimizer=True)
            return OPTIMIZER + THEN

        def step_ended(args: tuple[Any, ...], result: Any) -> None:
            if len(args) > 1:
                recorder.optimizer_stepped(id(args[1]))

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, always(OPTIMIZER))

        with (
            replaced(GradScaler, "step", lambda step: spanned(step, recorder, step_begins, step_ended)),
            replaced(GradScaler, "unscale_", wrap),
            replaced(GradScaler, "update", wrap),
        ):
            yield
