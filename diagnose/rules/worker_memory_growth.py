"""Workers come to own more and more memory, and slow down"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._supply import MIN_SHARE, supply_of
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules._worker_rule import WorkerRule

MIN_GROWTH_BYTES = 64 << 20
"""Per worker; less than a batch or two may be held back for a while."""

WAITS_GREW = 1.5
"""The wait in the last quarter of the run, relative to the first."""

MIN_FAULTS_PER_S = 10.0
"""Page faults that read the disk; a machine with memory to spare has none to speak of."""


def growing(growth_bytes: float, faults_per_s: float, **stats: float) -> Profile:
    """Workers that come to own so much more, on a machine that reads so many pages back."""
    return fed_by(
        data_wait_ms=20,
        fetch_ms=190,
        workers={"private_growth_bytes": growth_bytes},
        stats=stats,
        host=HostStats(cpus=8, process_cpus=1.0, major_faults_per_s=faults_per_s),
    )


class WorkerMemoryGrowth(WorkerRule):
    """
    ## What it means
    Each worker began with memory that it shared with the training process and has come to own more and more
    of it, and the machine runs out: pages are read back from disk, and batches come later and later. Python
    objects are the usual cause: only looking at one writes its reference count, and so copies its page.

    ## What to do
    Keep what the dataset knows of its samples in numpy arrays or tensors instead of lists and dictionaries
    of Python objects, and close what each sample opens.

    ## When it is wrong
    A cache that workers fill on purpose and that fits into memory.
    """

    needs = ("input.workers.private_growth_bytes", "host.major_faults_per_s", "input.early_wait_ns")
    explains = ("slow-storage", "slow-transform", "step-drift", "too-few-workers")
    fires_on = (growing(3e9, 300.0, early_wait_ns=5e6, late_wait_ns=40e6),)
    silent_on = (
        WELL_FED,
        growing(3e9, 0.0),
        growing(1e6, 300.0, early_wait_ns=5e6, late_wait_ns=40e6),
    )

    def check(self, profile: Profile) -> Finding | None:
        supply, stats = supply_of(profile), profile.input
        early_ns, late_ns = stats.early_wait_ns, stats.late_wait_ns
        if supply is None or early_ns is None or late_ns is None:
            return None
        growth, faults = supply.workers.private_growth_bytes, profile.host.major_faults_per_s
        if growth is None or growth < MIN_GROWTH_BYTES or faults is None or faults < MIN_FAULTS_PER_S:
            return None
        lost_ns = supply.wait_ns - early_ns
        if late_ns < WAITS_GREW * early_ns or lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Each worker's own memory grew by {format_bytes(growth)}, and the wait for a batch"
            f" from {format_ms(early_ns)} to {format_ms(late_ns)}.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=supply.wait_ns,
            assumption="batches stay as fast as they were in the first quarter of the run",
            evidence=(
                f"Memory that a worker shares with no other process grew by {format_bytes(growth)}.",
                f"{faults:.0f} page faults a second had to read the disk.",
                f"The wait grew from {format_ms(early_ns)} to {format_ms(late_ns)} a step.",
            ),
            fix="Keep the dataset's records in numpy arrays or tensors, not in lists of Python objects.",
            file=supply.loader.file,
            line=supply.loader.line,
        )
