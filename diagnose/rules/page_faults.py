"""Memory goes back to the system in each step, and is fetched anew in the next"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.freed_memory import as_statement, as_variables
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import NS_PER_S, format_ms, format_share
from diagnose.rules._cpus import spread
from diagnose.rules._examples import profile
from diagnose.rules._phases import STEP
from diagnose.rules.base import Rule

PAGE_BYTES = 4096

MIN_FAULTS = 20
"""Per step. A quarter of a megabyte of gradients is as many; fewer are Python's and torch's own objects."""

MIN_SHARE = 0.03

MOST_NS = 5_000
"""No fault of a small page takes longer: about 3 us were measured in a virtual machine. Time in the kernel
beyond that is something else's, such as reading files."""

LEAST, EXPECTED, MOST = 0.6, 1.2, 1.7
"""What is won, as parts of the time in the kernel (`benchmarks/page_faults.py`). More than all of it: what
is fresh from the kernel is in no table of the CPU's addresses."""

FORK_EVERY = 500
"""Steps. A process that starts workers fetches every page anew that it writes to since; where that is more
seldom, it is few pages a step."""

GROWS = 0.5
"""Where so much of what is fetched stays, the process grows: keeping what is freed would not help."""

CHURNS = HostStats(
    system_share=0.4, minor_faults_per_s=150_000.0, growth_bytes_per_s=0.0, on_cpu_share=0.98
)


class PageFaults(Rule):
    """
    ## What it means
    Gradients and activations are freed in every step. The C library gives large blocks, and what is free at
    the end of the heap, back to the system; the next step asks for them again, takes a page fault for each
    4 KiB, and the kernel fills every page with zeros before it can be used. Where the limits of that lie
    depends on which block was freed first, so that the same script is fast in one run and slow in the next.

    ## What to do
    Let the C library keep what is freed: `mallopt`, or in the environment `MALLOC_TRIM_THRESHOLD_` and
    `MALLOC_MMAP_THRESHOLD_`. Or load an allocator that keeps more, jemalloc or tcmalloc, with `LD_PRELOAD`.

    ## When it is wrong
    Memory-mapped files are fetched page by page too, and so is what a worker process shares until one of
    them writes to it. `diagnose run --tune` tries the fix and measures it.
    """

    needs = ("host.minor_faults_per_s", "host.system_share", "host.growth_bytes_per_s")
    actions = ("keep-freed-memory",)
    fires_on = (
        profile(step_ms=16, host=CHURNS),
        profile(step_ms=16, host=CHURNS, program=Program(loaders=(Loader(num_workers=0, epochs=20),))),
    )
    silent_on = (
        profile(step_ms=16, host=replace(CHURNS, minor_faults_per_s=1000.0)),
        profile(step_ms=16, host=replace(CHURNS, minor_faults_per_s=1e5, growth_bytes_per_s=4e8)),
        profile(step_ms=16, host=replace(CHURNS, minor_faults_per_s=1e5, system_share=0.01)),
        profile(step_ms=16, host=CHURNS, program=Program(loaders=(Loader(num_workers=4, epochs=20),))),
    )

    def applies(self, profile: Profile) -> bool:
        return profile.run.device == "cpu"

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        faults_per_s, system, growth = host.minor_faults_per_s, host.system_share, host.growth_bytes_per_s
        assert faults_per_s is not None and system is not None and growth is not None
        faults = faults_per_s * profile.step_time_ns / NS_PER_S
        in_kernel = min(system, faults_per_s * MOST_NS / NS_PER_S)
        if faults < MIN_FAULTS or EXPECTED * in_kernel < MIN_SHARE:
            return None
        if growth > GROWS * faults_per_s * PAGE_BYTES or _forks_often(profile):
            return None
        loads = any(not loader.num_workers for loader in profile.program.loaders)
        lost = spread(profile, EXPECTED * in_kernel, (*STEP, *([Phase.DATA_WAIT] if loads else [])))
        total = sum(lost.values())
        if not total:
            return None
        variables = " ".join(f"{name}={value}" for name, value in as_variables().items())
        return Finding(
            rule=self.name,
            summary=f"Memory goes back to the system and is fetched anew: {faults:,.0f} page faults in each"
            f" step, and {format_share(system)} of the time in the kernel",
            lost_ns=lost,
            low_ns=min(total, LEAST * in_kernel * profile.step_time_ns),
            high_ns=max(total, min(MOST * in_kernel, 0.95) * profile.step_time_ns),
            assumption="what is freed in a step is kept for the next",
            evidence=(
                f"{faults_per_s:,.0f} page faults a second, none of which read the disk; the process does"
                " not grow by them.",
                f"The training thread is in the kernel for {format_ms(system * profile.step_time_ns)}"
                " of each step.",
            ),
            fix=f"Keep freed memory: this line before training, or {variables} in the environment.",
            code=as_statement(),
            actions=self.actions,
        )


def _forks_often(profile: Profile) -> bool:
    """Whether workers are started so often that the pages shared with them explain the faults."""
    return any(
        loader.num_workers
        and not loader.persistent_workers
        and profile.steps.count < FORK_EVERY * loader.epochs
        for loader in profile.program.loaders
    )
