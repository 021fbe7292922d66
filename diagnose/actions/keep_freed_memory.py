"""Memory that is freed is kept for the next step"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diagnose.actions._malloc import FreedMemory, library
from diagnose.actions._memory import SHORT_SHARE, free_share
from diagnose.actions.base import Action, CannotApply
from diagnose.core.freed_memory import ROOM, as_statement
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class KeepFreedMemory(Action):
    """
    ## What it does
    Tells the C library (`mallopt`) to keep up to 1 GiB of what is freed, instead of giving it back to the
    system and asking for it anew. Gradients and activations are freed in every step; where their pages go
    back, the next step takes a page fault for each 4 KiB, and the kernel fills it with zeros.

    ## When it takes effect
    After some steps: until small blocks have found places, they take a part of a large one that is free,
    and the next large one is fetched once more.

    ## When it cannot help
    Work on a GPU, whose memory torch keeps itself. A process under jemalloc, tcmalloc or mimalloc. Faults
    that come from memory-mapped files, from records that grow, or after a fork.

    ## Hazards
    The process stays as large as it was at its peak, and somewhat larger, by up to 1 GiB. Large blocks then
    lie in the heap, which can only shrink from its end. Undone, both thresholds are where they were, as
    nearly as can be told (3 %), and what lay free has gone back; but the C library no longer moves the
    thresholds by itself, and there is room in the heap that was not there.
    """

    safety = Safety.EXACT
    order = 10
    settle_steps = 8
    steady = True

    def check(self, job: Job) -> None:
        if job.device != "cpu":
            raise CannotApply("torch keeps the memory of a device itself")
        library()
        if _is_short():
            raise CannotApply(SHORT)

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        memory = FreedMemory(library(), ROOM)
        try:
            yield memory
        finally:
            memory.unplug()

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        try:
            _in_force.append(self)
            with prepared.kept():
                yield
        finally:
            if self in _in_force:
                _in_force.remove(self)

    def why_not_stay(self, prepared: Any) -> str:
        return SHORT if _is_short() else ""

    def state(self, job: Job) -> Any:
        return len(_in_force)  # glibc tells nobody

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"statement": STATEMENT}


def _is_short() -> bool:
    free = free_share(Job())
    return free is not None and free < SHORT_SHARE


SHORT = "memory is short, and what is freed would be kept"

STATEMENT = as_statement()
"""The same for a script."""

_in_force: list[KeepFreedMemory] = []
