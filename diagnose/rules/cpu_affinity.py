"""The process is bound to fewer CPUs than the machine has free"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.settings import Settings
from diagnose.core.units import format_share
from diagnose.rules._cpus import delayed_share, has_heavy_operations, spread, won_by_threads
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

LEAST_USED = 0.85
"""A process that leaves more of its CPUs idle does not miss others."""

LEAST_IDLE = 0.6
"""A CPU that is idle for less of the time has other work."""

BOUNDS = (0.4, 1.25)

BOUND = HostStats(
    cpus=1,
    machine_cpus=4,
    num_threads=1,
    process_cpus=0.99,
    on_cpu_share=0.98,
    runnable_share=0.01,
    busy_cpus=1.2,
)
FREE = HostStats(cpus=4, machine_cpus=4, num_threads=1, process_cpus=1.0, runnable_share=0.1, busy_cpus=1.0)
HALF_USED = HostStats(
    cpus=2, machine_cpus=4, num_threads=2, process_cpus=0.5, runnable_share=0.0, busy_cpus=0.5
)
FROM_WITHIN = (
    "look for taskset or a variable such as KMP_AFFINITY, or widen the binding before torch is imported"
)
FROM_OUTSIDE = "ask the scheduler or the container for them, unless taskset or KMP_AFFINITY bound it"

LARGE = Settings(num_leaf_modules=10)


class CpuAffinity(Rule):
    """
    ## What it means
    The process may use only some of the machine's CPUs: `taskset`, a container's cpuset, a scheduler, or
    variables such as `KMP_AFFINITY` bound it to them. It keeps these busy while others are idle.

    ## What to do
    Widen the binding. What a container or a scheduler gave cannot be widened from within: ask it for more,
    as by `--cpuset-cpus` or `--cpus-per-task`. Or start no more threads and workers than CPUs are in it.

    ## When it is wrong
    CPUs that are kept free for others on purpose.
    """

    needs = ("host.runnable_share", "host.process_cpus", "host.busy_cpus")
    explains = ("too-many-workers",)
    of_host = True
    fires_on = (
        profile(host=replace(BOUND, cpuset_cpus=4), settings=LARGE),
        profile(host=replace(BOUND, runnable_share=0.4)),
    )
    silent_on = (
        profile(host=replace(BOUND, busy_cpus=3.9), settings=LARGE),
        profile(device="cuda", host=BOUND, settings=LARGE),
        profile(host=replace(BOUND, runnable_share=0.4, quota_cpus=1.0), settings=LARGE),
        profile(host=FREE, settings=LARGE),
        profile(host=HALF_USED, settings=LARGE),
    )

    def applies(self, profile: Profile) -> bool:
        host = profile.host
        return (host.cpus or 0) < (host.machine_cpus or 0) and profile.settings.local_processes == 1

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        assert host.cpus and host.machine_cpus and host.process_cpus is not None
        used = host.process_cpus + (host.child_cpus or 0.0)
        free = int((host.free_cpus or 0.0) + 1 - LEAST_IDLE)
        if used < LEAST_USED * host.cpus or not free:
            return None
        threads = host.num_threads or 1
        cpuset = host.cpuset_cpus or 0
        within = cpuset > host.cpus
        then = min(cpuset if within else host.machine_cpus, host.cpus + free)
        lost: dict[Phase, float] = dict(spread(profile, delayed_share(host)))
        # A thread that waits for a device spins, and more CPUs do not make that shorter.
        if profile.run.device == "cpu" and threads <= host.cpus < then and has_heavy_operations(profile):
            for phase, ns in won_by_threads(profile, threads, then).items():
                lost[phase] = max(lost.get(phase, 0.0), ns)
        total = sum(lost.values())
        if not total:
            return None
        by = profile.settings.bound_by
        return Finding(
            rule=self.name,
            summary=f"The process is bound to {host.cpus} of {host.machine_cpus} CPUs, and"
            f" {host.idle_cpus or 0:.1f} are idle",
            lost_ns=lost,
            low_ns=BOUNDS[0] * total,
            high_ns=min(BOUNDS[1] * total, profile.step_time_ns),
            assumption="no thread waits for a CPU, and heavy operations are divided among all CPUs",
            evidence=(
                f"os.sched_getaffinity holds {host.cpus} of {host.machine_cpus} CPUs"
                + (f" ({by} is set)." if by else "."),
                f"The process and its workers use {used:.1f} CPUs; the training thread waits for one for"
                f" {format_share(host.runnable_share or 0.0)} of the time.",
            ),
            fix=f"Let the process use {then} CPUs: {FROM_WITHIN if within else FROM_OUTSIDE}.",
            code="os.sched_setaffinity(0, range(os.cpu_count()))" if within else "",
        )
