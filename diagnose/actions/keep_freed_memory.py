"""Memory that is freed is kept for the next step"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diagnose.actions._malloc import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, kept, library, mapped_from
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety

ROOM = 1 << 30
"""Bytes. More than that lies free in few steps, and goes back as before."""


class KeepFreedMemory(Action):
    """
    ## What it does
    Tells the C library (`mallopt`) to keep up to 1 GiB of what is freed, instead of giving it back to the
    system and asking for it anew. Gradients and activations are freed in every step; where their pages go
    back, the next step takes a page fault for each 4 KiB, and the kernel fills it with zeros.

    ## When it takes effect
    After a step or two, in which the pages are fetched for the last time.

    ## When it cannot help
    Work on a GPU, whose memory torch keeps itself. A process under jemalloc, tcmalloc or mimalloc. Faults
    that come from memory-mapped files, from records that grow, or after a fork.

    ## Hazards
    The process stays as large as it was at its peak, by up to 1 GiB. Large blocks then lie in the heap,
    which can only shrink from its end. Undone, both thresholds are where they were, as nearly as can be
    told (3 %), but the C library no longer moves them by itself.
    """

    safety = Safety.EXACT
    order = 10
    settle_steps = 3

    def check(self, job: Job) -> None:
        """See `Action.check`."""
        if job.device != "cpu":
            raise CannotApply("torch keeps the memory of a device itself")
        library()

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        """See `Action.prepare`."""
        glibc = library()
        yield glibc, mapped_from(glibc)

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        """See `Action.apply`."""
        glibc, threshold = prepared
        try:
            _in_force.append(self)
            with kept(glibc, threshold, ROOM):
                yield
        finally:
            if self in _in_force:
                _in_force.remove(self)

    def state(self, job: Job) -> Any:
        """See `Action.state`."""
        return len(_in_force)  # glibc tells nobody

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        """See `Action.settings`."""
        return {"statement": STATEMENT}


STATEMENT = "; ".join(
    [
        "import ctypes",
        *(f"ctypes.CDLL(None).mallopt({each}, 1 << 30)" for each in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD)),
    ]
)
"""The same for a script."""

_in_force: list[KeepFreedMemory] = []
