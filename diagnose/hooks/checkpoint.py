"""Time in saving state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from diagnose.core.ledger import CHECKPOINT
from diagnose.hooks._recorder import Recorder
from diagnose.hooks.base import Hook, replaced_in, spanned


class CheckpointHook(Hook):
    """Charges `torch.save` to `checkpoint`."""

    requires = "torch.serialization"

    @contextmanager
    def install(self, recorder: Recorder) -> Iterator[None]:
        import torch

        with replaced_in((torch.serialization, torch), "save", wrapped(recorder)):
            yield


def wrapped(recorder: Recorder) -> Callable[[Any], Any]:
    """Returns what wraps a function that saves, charges the outermost save and notes it as an event."""

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        if recorder.current == CHECKPOINT:
            return -1
        recorder.event("checkpoint")
        return CHECKPOINT

    return lambda original: spanned(original, recorder, before)
