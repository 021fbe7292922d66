"""Full garbage collections: long, and too rare for windows of steps to show what they cost."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

from diagnose.actions.base import NotYet

OLDEST = 2
"""The generation whose collections walk every object."""

MIN_PAUSES = 6
"""With fewer, what they take on average is hardly known: of four half is believed."""

PATIENCE_STEPS = 300
"""Where none has come in so many, none is waited for. Nor is it where the user asks for the fix by name."""


class Pauses:
    """Times the full collections of a process, and what steps take longer for them.

    Args:
        counts: Whether they are told: else none is waited for.

    Attributes:
        ns: What all of them took so far.
        number: How many there were.
    """

    def __init__(self, *, counts: bool = True) -> None:
        self.ns = 0
        self.number = 0
        self._marked_ns = self._marked = 0
        self._counts = counts
        self._counted_ns = self._counted = self._steps = 0
        self._calm_ns = self._calm_steps = self._paused_ns = self._paused_steps = 0
        self._is_spared = False
        self._left_ns = self._left_steps = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While open, collections are timed."""
        began = 0

        def told(phase: str, info: dict[str, Any]) -> None:
            nonlocal began
            if info["generation"] != OLDEST:
                return
            if phase == "start":
                began = perf_counter_ns()
            elif began:
                self.ns += perf_counter_ns() - began
                self.number += 1
                began = 0

        gc.callbacks.append(told)
        try:
            yield
        finally:
            gc.callbacks.remove(told)

    def mark(self) -> None:
        """The script goes on: what was collected meanwhile was ours."""
        self._marked_ns, self._marked = self.ns, self.number

    def steps_ended(self, time_ns: int, steps: int) -> int:
        """Takes note of steps of the script, and returns what full collections took in them.

        Args:
            time_ns: Wall time since `mark`.
            steps: How many steps passed in it.
        """
        taken_ns, number = self.ns - self._marked_ns, self.number - self._marked
        if self._counts:
            self._steps += steps
            if number:
                self._counted_ns += taken_ns
                self._counted += number
                self._paused_ns += time_ns
                self._paused_steps += steps
            else:
                self._calm_ns += time_ns
                self._calm_steps += steps
        elif self._is_spared:
            self._left_ns += taken_ns
            self._left_steps += steps
        return taken_ns

    def spare(self, on: bool) -> None:
        """A change that collections depend on is in force, or not any more: no step is as it was."""
        self._counts = False
        self._is_spared = on

    def check(self, patience_steps: int = PATIENCE_STEPS) -> None:
        """Looks whether enough of them have come to tell what they cost, or none for long.

        Args:
            patience_steps: So many steps the first one is waited for.

        Raises:
            NotYet: If not.
        """
        if not self._counts or self._counted >= MIN_PAUSES:
            return
        if self._counted or self._steps < patience_steps:
            seen = {0: "no full collection", 1: "one full collection"}.get(
                self._counted, f"{self._counted} full collections"
            )
            raise NotYet(f"{seen} came so far: too few to tell what they cost")

    def usual_ns(self) -> tuple[float, float]:
        """Returns what they add to a counted step on average, less a standard error, and that error.

        Only what lengthened the steps they fell into counts: a host that runs ahead of its device may
        collect for nothing. They are taken to come at random, so that one alone proves nothing.
        """
        if not self._counted or not self._calm_steps:
            return 0.0, 0.0
        longer_ns = self._paused_ns - self._paused_steps * self._calm_ns / self._calm_steps
        mean_ns = min(max(0.0, longer_ns), self._counted_ns) / self._steps
        error_ns = mean_ns / math.sqrt(self._counted)
        return mean_ns - error_ns, error_ns

    def left_ns(self) -> float:
        """Returns what they add to a step while they are spared, on average so far."""
        return self._left_ns / self._left_steps if self._left_steps else 0.0
