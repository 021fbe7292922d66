"""What a loop gets of the other ranks that may be gradients, or what optimizers made of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

LEAST, FEW = 0.02, 100
"""Part of all numbers, and numbers of a call, below which a line is not of gradients, unless it was seen to
be: a norm of each layer, or counts for the log. The gradients of a small module in one tensor are more."""


@dataclass(slots=True)
class Line:
    """What one line of a script gets of the other ranks.

    Attributes:
        is_gradient: Whether it was seen to be the gradient of a parameter.
        calls: How often.
        elements: How many numbers.
        summed: How many of these are gathered to add them up, not to hand on what was.
        waited_ns: How long that took.
    """

    is_gradient: bool
    calls: int = 0
    elements: int = 0
    summed: int = 0
    waited_ns: int = 0


class Sums:
    """What was added up over the ranks so far that may be gradients, by the line that asked for it.

    Attributes:
        works: What is under way, and for which line.
    """

    def __init__(self) -> None:
        self.works: weakref.WeakKeyDictionary[Any, Line] = weakref.WeakKeyDictionary()
        self._lines: dict[tuple[CodeType, int], Line] = {}
        self._passes = self._last_pass = 0

    def line(self, caller: FrameType, tensor: Any, models: Callable[[], Iterable[Any]]) -> Line:
        """Returns the line that a frame is in; of a new one it is seen whether it is of a gradient.

        Args:
            caller: The frame.
            tensor: What it gives the other ranks.
            models: Returns those that are trained.
        """
        key = caller.f_code, caller.f_lineno
        if key not in self._lines:
            self._lines[key] = Line(any(_is_gradient(tensor, model) for model in models()))
        return self._lines[key]

    def add(self, line: Line, elements: int, took_ns: int, backward_pass: int, *, summed: bool) -> None:
        """Adds a call.

        Args:
            line: It is on this one.
            elements: How many numbers it is for.
            took_ns: How long it took.
            backward_pass: The pass that it came in or after.
            summed: Whether it adds up, or gathers what the script then does.
        """
        line.calls += 1
        line.waited_ns += took_ns
        line.elements += elements
        line.summed += elements if summed else 0
        if self._last_pass != backward_pass:
            self._last_pass = backward_pass
            self._passes += 1

    def figures(self) -> dict[str, int]:
        """Returns all that may be gradients."""
        least = LEAST * sum(line.elements for line in self._lines.values())
        lines = [
            line
            for line in self._lines.values()
            if line.is_gradient or line.elements >= least or line.elements >= FEW * line.calls
        ]
        return {
            "elements": sum(line.summed for line in lines),
            "passes": self._passes,
            "waited_ns": sum(line.waited_ns for line in lines),
        }


def _is_gradient(tensor: Any, model: Any) -> bool:
    """Whether a tensor is a gradient of a model's, or has its memory."""
    import torch

    gradients = (p.grad for p in model.parameters() if p.grad is not None)
    return any(
        gradient is tensor
        or (gradient.layout is tensor.layout is torch.strided and gradient.data_ptr() == tensor.data_ptr())
        for gradient in gradients
    )
