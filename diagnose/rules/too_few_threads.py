"""Heavy operations run on fewer threads than there are free CPUs"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.settings import Settings
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._cpus import has_heavy_operations, won_by_threads
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

LEAST_IDLE = 0.6
"""A CPU that is idle for less of the time has other work, and a thread on it would wait for its turn."""

BOUNDS = (0.4, 1.25)
"""How well operations divide among threads depends on their shapes."""

ONE_OF_FOUR = HostStats(
    cpus=4, machine_cpus=4, num_threads=1, on_cpu_share=0.99, process_cpus=1.0, busy_cpus=1.1
)
QUOTA_OF_TWO = HostStats(
    cpus=64, machine_cpus=64, num_threads=2, quota_cpus=2.0, process_cpus=1.9, busy_cpus=5.0
)
LARGE, SMALL = Settings(num_leaf_modules=10, omp_num_threads=1), Settings(num_leaf_modules=2000)


class TooFewThreads(Rule):
    """
    ## What it means
    Torch divides large operations among its intra-op threads, and it has fewer of them than there are CPUs
    that nobody uses. Launchers of several processes set `OMP_NUM_THREADS=1` without being asked.

    ## What to do
    Set `OMP_NUM_THREADS` before the start, or call `torch.set_num_threads`, so that all processes of the
    machine together have as many threads as there are CPUs.

    ## When it is wrong
    Models whose operations are too small to be divided; the forward of a module has to take 80 us.
    """

    needs = ("host.num_threads", "host.process_cpus", "host.busy_cpus", "settings.num_leaf_modules")
    actions = ("set-threads",)
    fires_on = (profile(host=ONE_OF_FOUR, settings=LARGE),)
    silent_on = (
        profile(host=ONE_OF_FOUR, settings=SMALL),
        profile(
            host=HostStats(cpus=4, machine_cpus=4, num_threads=1, process_cpus=1.0, busy_cpus=3.9),
            settings=LARGE,
        ),
        profile(
            host=HostStats(cpus=4, machine_cpus=4, num_threads=4, process_cpus=3.8, busy_cpus=3.9),
            settings=LARGE,
        ),
        profile(host=QUOTA_OF_TWO, settings=LARGE),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        host = profile.host
        return profile.run.device == "cpu" and (host.num_threads or 0) < (host.whole_cpus or 1)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        host, settings = profile.host, profile.settings
        assert host.num_threads and host.whole_cpus and settings.num_leaf_modules
        idle = host.free_cpus or 0.0
        free = int(idle + 1 - LEAST_IDLE) // settings.local_processes
        then = min(host.whole_cpus, host.num_threads + free)
        if then <= host.num_threads or not has_heavy_operations(profile):
            return None
        lost = won_by_threads(profile, host.num_threads, then)
        total = sum(lost.values())
        if not total:
            return None
        leaf_ns = profile.phase_time_ns[Phase.FORWARD] / settings.num_leaf_modules
        omp = settings.omp_num_threads
        cause = f"OMP_NUM_THREADS={omp}" if omp else "OMP_NUM_THREADS is not set"
        return Finding(
            rule=self.name,
            summary=f"Torch computes on {host.num_threads} of {host.whole_cpus} CPUs, and {idle:.1f} are"
            " free",
            lost_ns=lost,
            low_ns=BOUNDS[0] * total,
            high_ns=BOUNDS[1] * total,
            assumption="three quarters of forward and backward, and a third of the optimizer, divide",
            evidence=(
                f"torch.get_num_threads() is {host.num_threads} ({cause}); the process uses"
                f" {host.process_cpus:.1f} CPUs, and {idle:.1f} of {host.machine_cpus} are free to it.",
                f"A module's forward takes {format_duration(leaf_ns)} on average, enough to be divided.",
                f"{format_ms(total)} of each step, {format_share(total / profile.step_time_ns)}.",
            ),
            fix=f"Give torch {then} threads.",
            code=f"torch.set_num_threads({then})",
            actions=self.actions,
        )
