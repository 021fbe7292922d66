"""The thread that pins batches cannot keep up"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats, PythonThread
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._loader_calls import with_loader_arguments
from diagnose.rules._supply import (
    MIN_SHARE,
    SATURATED,
    supply_of,
)
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules.base import Rule

THREAD = "_pin_memory_loop"
"""What torch's pinning thread runs; Python names threads after it."""

MIN_CPUS = 0.6
"""CPU time of that thread per wall time. It shares the interpreter lock, so it never has a whole CPU."""


PINNING = HostStats(
    cpus=8,
    process_cpus=1.9,
    python_threads=(PythonThread(name="Thread-3 (_pin_memory_loop)", cpus=0.9),),
)


class SlowPinning(Rule):
    """
    ## What it means
    The workers have time to spare and the loop waits all the same: between them, one thread of the training
    process unpacks every batch and copies it to page-locked memory, and that thread is busy all the time.

    ## What to do
    Return fewer and smaller tensors per batch (uint8 images instead of float32), or set `pin_memory=False`
    and measure: without pinning, the copy to the device is slower, but nothing is copied twice.

    ## When it is wrong
    Where the training thread holds the interpreter lock all the time, which slows this thread down too.
    """

    needs = ("input.workers", "input.steady_wait_ns")
    fires_on = (fed_by(data_wait_ms=30, fetch_ms=60, loader={"pin_memory": True}, host=PINNING),)
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=30, fetch_ms=60, loader={"pin_memory": True}),
        fed_by(data_wait_ms=30, fetch_ms=190, loader={"pin_memory": True}, host=PINNING),
    )

    def applies(self, profile: Profile) -> bool:
        return any(loader.num_workers and loader.pin_memory for loader in profile.program.loaders[:1])

    def check(self, profile: Profile) -> Finding | None:
        supply = supply_of(profile)
        cpus = sum(thread.cpus for thread in profile.host.python_threads if THREAD in thread.name)
        if supply is None or cpus < MIN_CPUS:
            return None
        if supply.wait_share < MIN_SHARE or supply.load >= SATURATED:
            return None
        return Finding(
            rule=self.name,
            summary=f"The thread that pins batches is busy {format_share(min(1.0, cpus))} of the time, and"
            f" the loop waits for it {format_share(supply.wait_share)} of each step.",
            lost_ns={Phase.DATA_WAIT: supply.wait_ns},
            low_ns=0.3 * supply.wait_ns,
            high_ns=supply.wait_ns,
            assumption="batches are handed on as fast as the workers make them",
            evidence=(f"The pinning thread uses {cpus:.2f} CPUs.", *supply.evidence()),
            fix="Return fewer and smaller tensors, or try without pinning.",
            code=with_loader_arguments(profile, supply.loader, pin_memory=False),
            file=supply.loader.file,
            line=supply.loader.line,
        )
