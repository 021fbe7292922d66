"""Memory is short, and the system swaps"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.profile import Profile
from diagnose.core.units import format_bytes, format_share
from diagnose.rules._cpus import MOST, spread
from diagnose.rules._examples import profile
from diagnose.rules._machine import disk
from diagnose.rules.base import Rule

MIN_STALL = 0.03
"""The kernel counts stalls for memory; a machine with enough of it has none."""

MIN_FAULTS_PER_S = 10
"""Pages that this process had to read back, per second. Loading a library takes some, once."""

PRESSED = HostStats(memory_stall_share=0.3, on_cpu_share=0.6, runnable_share=0.02, major_faults_per_s=500.0)


class MemoryPressure(Rule):
    """
    ## What it means
    The machine's memory is full. The system writes pages to the disk, or drops those it can read again, and
    the process waits for them to come back.

    ## What to do
    Use fewer DataLoader workers, a smaller prefetch factor, memory-mapped data, or a larger machine.

    ## When it is wrong
    Data that is read through memory maps for the first time also comes from the disk page by page.
    """

    needs = ("host.memory_stall_share", "host.major_faults_per_s", "host.on_cpu_share")
    fires_on = (profile(host=replace(PRESSED, swapped_bytes=1 << 30)),)
    silent_on = (
        profile(host=replace(PRESSED, major_faults_per_s=1.0)),
        profile(host=replace(PRESSED, memory_stall_share=0.0, runnable_share=0.0)),
    )

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        stall, faults = host.memory_stall_share, host.major_faults_per_s
        assert stall is not None and faults is not None
        if stall < MIN_STALL or faults < MIN_FAULTS_PER_S:
            return None
        waiting = host.off_cpu_share or 0.0
        lost = spread(profile, min(stall, max(waiting, MIN_STALL), MOST))
        total = sum(lost.values())
        swapped = f", {format_bytes(host.swapped_bytes)} of it swapped out" if host.swapped_bytes else ""
        return Finding(
            rule=self.name,
            summary=f"Memory is short: something waited for it for {format_share(stall)} of the time",
            lost_ns=lost,
            low_ns=0.0,
            high_ns=max(total, min(2 * total, MOST * profile.step_time_ns)),
            assumption="the training thread was among the tasks that waited",
            evidence=(
                f"The process read {faults:,.0f} pages a second back from the disk{swapped}.",
                f"Tasks of the machine waited for memory for {format_share(stall)} of the time.",
                *disk(host),
            ),
            fix="Use less memory: fewer workers, a smaller prefetch_factor, memory-mapped data.",
        )
