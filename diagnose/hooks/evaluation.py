"""When the model is switched to evaluation mode and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.hooks._recorder import EVALUATION, Recorder
from diagnose.hooks.base import THEN, Hook, replaced, spanned


class EvaluationHook(Hook):
    """Charges what lies between `model.eval()` and `model.train()` to `evaluation`, where no other hook
    sees it.

    Only a module that has been called in training counts: a frozen teacher in evaluation mode does not. The
    model calls themselves are the forward hook's.
    """

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        """See `Hook.install`."""
        import torch

        leaving = False

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal leaving
            if id(args[0]) not in recorder.models:
                return -1
            if args[1] if len(args) > 1 else kwargs.get("mode", True):
                if leaving or not recorder.evaluating or not recorder.outermost:
                    return -1  # DDP switches the module that it holds, too
                leaving = True
                return EVALUATION + THEN
            leaving = False
            recorder.evaluation_region(True)
            return -1

        def after(args: tuple[Any, ...], result: Any) -> None:
            nonlocal leaving
            leaving = False
            recorder.evaluation_region(False)

        with replaced(
            torch.nn.Module, "train", lambda original: spanned(original, recorder, before, after)
        ):
            yield
