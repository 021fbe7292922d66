"""Garbage is collected between steps, and long-lived objects are left out"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from diagnose.actions._memory import resident_bytes
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.hooks._looks import added

FULL_EVERY, FULL_EVERY_AT_MOST = 250, 16_000
"""Steps between collections of what has survived a step: it visits all that was made since the freeze. One
that finds nothing doubles the steps to the next, so that a script whose records grow does not pay for each
of them again and again."""

LOOK_EVERY = 10
"""Steps between looks at the memory: a look takes some ten microseconds, with a GPU some more."""

GROWTH_BYTES, GROWTH_BYTES_AT_MOST = 256 << 20, 4 << 30
"""Memory that the process, or its tensors on the GPU, may gain before a collection of all there is comes
early. One that frees little doubles what they may gain before the next: a script that fills a cache, or its
GPU, does not pay for a look at all of its objects again and again."""

ALLOCATIONS = 50_000
"""Objects that one step may leave behind before Python collects of its own accord: a step that makes cycles
of large tensors must not fill the memory. Python's own threshold is 700, or 2000."""

NEVER = 100_000
"""Young collections before an old one that is not ours: more than a run has steps between ours."""


class GcFreeze(Action):
    """
    ## What it does
    Tells Python's garbage collector to pass over every object that exists now (`gc.freeze`), and to collect
    at the end of each step, when hardly anything is alive that is young. What survives is looked at after
    250 steps, then less and less often while there is no garbage in it, earlier if the process, or what
    its tensors take of the GPU, grows by 256 MiB, or by more where that freed little before. All ranks do
    so at the same step, instead of each making the others wait at another: there the steps in between
    double whatever is found.

    ## When it takes effect
    At once.

    ## When it cannot help
    A program that has taken the collector into its own hands: it is left alone. Pauses that come from
    freeing memory, not from looking for garbage.

    ## Hazards
    Full collections are too rare for its trial: what they took before it counts, less a standard error, in
    the trial and in each confirmation, and the interval spans twice that to either side. In a script that
    makes most of its objects early they would have come less often later, so that it wins less.

    Cycles among frozen objects that become garbage are not freed until memory grows, as above, or it is
    undone. Finalizers of cycles run at the end of a step rather than in the middle.
    """

    safety = Safety.EXACT
    order = 10
    window_steps = 20
    spares_collections = True

    def check(self, job: Job) -> None:
        if not gc.isenabled() or not gc.get_threshold()[0]:
            raise CannotApply("the script has switched the garbage collector off")
        if gc.get_freeze_count():
            raise CannotApply("the script has frozen objects itself")

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        gc.collect()  # what is garbage now would be frozen
        yield value

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        self.check(job)
        thresholds = gc.get_threshold()
        collect = _Collections().step
        gc.collect(1)
        try:
            gc.freeze()
            gc.set_threshold(ALLOCATIONS, thresholds[1], NEVER)
            with added(job.on_step, collect):
                yield
        finally:
            gc.set_threshold(*thresholds)
            gc.unfreeze()

    def state(self, job: Job) -> Any:
        return gc.isenabled(), gc.get_threshold(), bool(gc.get_freeze_count()), list(job.on_step)

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        thresholds = ", ".join(map(str, (ALLOCATIONS, gc.get_threshold()[1], NEVER)))
        before = f"gc.collect(); gc.freeze(); gc.set_threshold({thresholds})"
        return {"advice": f"{before} right before the loop, and gc.collect(1) at the end of each step."}


class _Collections:
    """Collects at the end of each step, and looks at all that is not frozen now and then."""

    def __init__(self) -> None:
        self._steps = 0
        self._interval = FULL_EVERY
        self._due = FULL_EVERY
        self._held = held_bytes()
        self._growth = [GROWTH_BYTES] * len(self._held)

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        due = self._steps >= self._due
        if not due and not self._has_grown():
            gc.collect(1)
            return
        if not due:
            gc.unfreeze()  # what takes the room may be garbage that was frozen, such as a model in a cycle
        found = gc.collect()
        before, self._held = self._held, held_bytes()
        if not due:
            gc.freeze()
            self._growth = [
                GROWTH_BYTES if now < then + growth // 2 else min(2 * growth, GROWTH_BYTES_AT_MOST)
                for now, then, growth in zip(self._held, before, self._growth, strict=True)
            ]
        ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
        if ranks and not due:
            return  # how one rank has grown must not move its collections against the others'
        again = found and not ranks
        self._interval = FULL_EVERY if again else min(2 * self._interval, FULL_EVERY_AT_MOST)
        self._due = self._steps + self._interval

    def _has_grown(self) -> bool:
        if self._steps % LOOK_EVERY:
            return False
        each = zip(held_bytes(), self._held, self._growth, strict=True)
        return any(now >= before + growth for now, before, growth in each)


def held_bytes() -> tuple[int, int]:
    """Returns the memory that the process occupies, and what its tensors take of the current GPU."""
    # The allocator counts on the host, so that nothing waits for the device.
    return resident_bytes(), torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
