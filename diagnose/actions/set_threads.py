"""Another number of threads for each operation"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from diagnose.actions._routes import refuse_compiled
from diagnose.actions.base import Action, CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety


class SetThreads(Action):
    """
    ## What it does
    Sets the number of threads that share an operation on the CPU: one, half of the CPUs that this process
    may use, or all of them, whichever of these the loop runs fastest with. Training processes on the same
    machine get equal parts.

    ## When it takes effect
    At the next operation.

    On a CPU it is tried also where nothing was found: whether small operations are done sooner by one
    thread than by all is seen in no reading.

    ## When it cannot help
    Operations too small to be shared, which is why one thread is among the choices, and work on a GPU.
    DataLoader workers have one thread each, and keep it.

    ## Hazards
    A sum is split at other places, so it rounds otherwise. A compiled graph is compiled again for another
    number. The best number changes when the neighbours on the machine do. It holds for evaluations, too,
    which trials leave out: where their batches are far larger, another number may be better for them.
    """

    safety = Safety.ROUNDING
    order = 10
    settle_steps = 2
    touches = "model"
    unasked = True

    def check(self, job: Job) -> None:
        if not self.values(job):
            raise CannotApply(f"there is no choice: this process may use {cpus(job)} CPU")

    def check_unasked(self, job: Job) -> None:
        if job.device != "cpu":
            raise CannotApply("the operations run on a device")
        refuse_compiled(job)

    def values(self, job: Job) -> Sequence[int | None]:
        most = cpus(job)
        now = torch.get_num_threads()
        return [number for number in sorted({1, max(1, most // 2), most}) if number != now]

    def largest(self, job: Job) -> int | None:
        return cpus(job)

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(prepared)
            yield
        finally:
            torch.set_num_threads(before)

    def state(self, job: Job) -> Any:
        return torch.get_num_threads()

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        return {"statement": f"torch.set_num_threads({value})"}


def cpus(job: Job) -> int:
    """Returns the CPUs that one training process may use, its share of what this machine gives them all."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = job.facts.get("quota_cpus") or allowed
    return max(1, int(min(allowed, quota)) // job.local_ranks)
