"""When the model is switched to evaluation mode and back."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import EVALUATION
from diagnose.hooks._met import was_trained
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import THEN, Hook, hidden, replaced, spanned, unseen


class EvaluationHook(Hook):
    """Charges what lies between `model.eval()` and `model.train()` to `evaluation`, where no other hook
    sees it.

    Only a module that has been called in training counts: a frozen teacher in evaluation mode does not. The
    model calls themselves are the forward hook's.
    """

    requires = "torch.nn.modules.module"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch
        from torch.compiler import is_dynamo_compiling

        leaving = False
        models = recorder.met.models

        def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            nonlocal leaving
            if not was_trained(models, args[0]):
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

        def wrap(original: Any) -> Any:
            asked = spanned(original, recorder, before, after)

            def call(*args: Any, **kwargs: Any) -> Any:
                # Each module asks its children, and trainers ask the model in every step.
                is_unmet = is_dynamo_compiling() or id(args[0]) not in models
                switch = original if is_unmet else asked
                try:
                    return switch(*args, **kwargs)
                except BaseException as error:
                    unseen(error)
                    raise

            return hidden(functools.wraps(original)(call))

        with replaced(torch.nn.Module, "train", wrap):
            yield
