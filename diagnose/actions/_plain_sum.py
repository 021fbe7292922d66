"""Whether the passes of a step do nothing but add up their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable

from diagnose.actions._careful import in_short
from diagnose.actions._nested import differentiable
from diagnose.hooks._signals import from_signal_handler
from diagnose.hooks.ddp_waits import is_autograd_compiled


class PlainSum:
    """Compares what a pass has left with what the next one of the same step finds.

    A pass has left its gradients when DDP has averaged them: autograd calls functions at the end of a pass
    in the order in which they were asked for, DDP's when the last gradient is there. Ours is asked for by
    one that was asked for as the pass began.

    Args:
        goes_back: Called as a pass begins.

    Attributes:
        parameters: Those of the model that are trained.
        reason: Why it is no plain sum; empty as long as nothing speaks against it.
        seen: Passes of this step that left what the next one found.
    """

    def __init__(self, model: torch.nn.Module, goes_back: Callable[[], None]) -> None:
        self.reason = ""
        self.seen = 0
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._versions: list[int] = []
        self._left: list[tuple[int, int]] | None = None
        self._asked = False
        self._tell = goes_back

    def begins(self, first: bool) -> None:
        """The model is going to be called.

        Args:
            first: Whether before the first pass of this step.
        """
        versions = [p._version for p in self.parameters]
        if first:
            self._versions, self.seen = versions, 0
        elif self._left is not None:
            self.seen += 1
            if versions != self._versions:
                self.reason = "parameters are changed between two passes of a step"
            elif self._left != self._gradients():
                self.reason = "gradients are changed between two passes of a step, as by clipping"
        self._left, self._asked = None, False

    def called(self, output: Any) -> bool:
        """The model was called; returns whether a pass through what it has returned will be seen."""
        if is_autograd_compiled():
            return False
        try:
            ends = [end for end in differentiable(output) if not end.is_leaf]
            for end in ends:
                end.register_hook(self._goes_back)
        except Exception as error:
            if from_signal_handler(error.__traceback__):
                raise  # the script's own
            self.reason = f"what its passes leave cannot be seen: {in_short(error)}"
            return False
        return bool(ends)

    def _goes_back(self, gradient: torch.Tensor) -> None:
        if not self._asked:
            self._asked = True
            self._tell()
            _at_the_end(lambda: _at_the_end(self._ended))

    def _ended(self) -> None:
        self._left, self._asked = self._gradients(), False

    def _gradients(self) -> list[tuple[int, int]]:
        gradients = [p.grad for p in self.parameters]
        return [(0, 0) if each is None else (id(each), each._version) for each in gradients]


def _at_the_end(call: Callable[[], None]) -> None:
    """Asks for a call at the end of the pass under way."""
    Variable._execution_engine.queue_callback(call)
