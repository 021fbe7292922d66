"""Time in autograd."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import SLOT_OF
from diagnose.hooks._recorder import EVERY_SITE_UNTIL, Recorder
from diagnose.hooks.base import Hook, replaced, spanned

BACKWARD = SLOT_OF["backward"]
EVALUATION = SLOT_OF["evaluation"]
FORWARD = SLOT_OF["forward"]


class BackwardHook(Hook):
    """Charges `autograd.backward`, which `Tensor.backward` calls, and `autograd.grad` to `backward`.

    Torch has no process-wide hook around a backward pass. Only the outermost counts as a pass: reentrant
    checkpointing runs one inside another.
    """

    requires = "torch.autograd"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        import torch

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            current = recorder.current
            if current == BACKWARD or (current == EVALUATION and not recorder.evaluating):
                return -1
            if current != FORWARD:  # a gradient taken inside the model is part of the model
                if recorder.alert:
                    recorder.work_begins()
                recorder.backward_passes = passes = recorder.backward_passes + 1
                if passes < EVERY_SITE_UNTIL or not passes % EVERY_SITE_UNTIL:
                    recorder.site("backward")
                    if recorder.on_backward is not None:
                        recorder.guarded(recorder.on_backward, args)
            return BACKWARD

        def wrap(original: Any) -> Any:
            return spanned(original, recorder, before)

        with (
            replaced(torch.autograd, "backward", wrap),
            replaced(torch.autograd, "grad", wrap),
        ):
            yield
