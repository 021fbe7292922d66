"""Heavy operations run on fewer threads than there are free CPUs"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.graph import Graph, Work
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.settings import Settings
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._cpus import USUAL_HEAVY, has_heavy_operations, heavy_shares, won_by_threads
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

LEAST_IDLE = 0.8
"""A CPU that is idle for less of the time has other work, and the thread on it makes the others wait until
it is its turn. Measured on two CPUs beside a loader's worker: where that used 0.15 of one, a second thread
made the job a seventh faster; where it used 0.33, no faster."""

WON = (0.0, 0.5, 1.25)
"""How well operations divide among threads depends on their shapes, hence the upper bound. They may win
nothing: CPUs of a virtual machine can be two halves of one core, or all threads can be kept on one of them,
and no reading of a run with fewer threads shows it. So half of it is expected."""

MOST_BESIDE = 0.33
"""Where the last free CPU is used for so much of the time, the thread on it wins nothing; where for half of
it, three quarters of what it would: see `LEAST_IDLE`."""

LEAST_BESIDE = 0.05
"""CPUs that is used by what a script leaves one to; less is a thread that only looks now and then."""

MOST_DELAY = 0.05
"""A thread that waits for its turn for more of the time although a CPU is free is not given that CPU, and
nor would one more be."""

ONE_OF_FOUR = HostStats(
    cpus=4, machine_cpus=4, num_threads=1, on_cpu_share=0.99, process_cpus=1.0, busy_cpus=1.1
)
QUOTA_OF_TWO = HostStats(
    cpus=64, machine_cpus=64, num_threads=2, quota_cpus=2.0, process_cpus=1.9, busy_cpus=5.0
)
BESIDE_A_WORKER = replace(ONE_OF_FOUR, cpus=2, machine_cpus=2, busy_cpus=1.15, child_cpus=0.15)
LARGE, SMALL = Settings(num_leaf_modules=10, omp_num_threads=1), Settings(num_leaf_modules=2000)
NO_MODULE = Settings(num_leaf_modules=0, omp_num_threads=1)
CHOSEN = replace(LARGE, sets_threads=True)


def timed(heavy: float) -> Program:
    """Returns a program with so much of its time in operations that threads divide."""
    whole = Work(num_ops=9, backward_ns=20e6, forward_ns=10e6)
    part = Work(num_ops=9, backward_ns=20e6 * heavy, forward_ns=10e6 * heavy)
    return Program(graph=Graph(num_nodes=20, total=whole, heavy=part))


class TooFewThreads(Rule):
    """
    ## What it means
    Torch divides large operations among its intra-op threads, and it has fewer of them than there are CPUs
    that nobody uses. Launchers of several processes set `OMP_NUM_THREADS=1` without being asked. A script
    that sets the number itself, and has workers or threads of its own on the other CPUs, has divided the
    machine, and is not named.

    ## What to do
    Set `OMP_NUM_THREADS` before the start, or call `torch.set_num_threads`, so that all processes of the
    machine together have as many threads as there are CPUs. Then compare the steps: only a trial tells
    whether they are faster. `diagnose run --tune --only set-threads` makes one.

    ## When it is wrong
    Models whose operations are too small to be divided: they have to take 80 us in the forward pass, or a
    module has to where none was timed. Virtual machines whose CPUs are no cores of their own, or that keep
    the threads of a process on one CPU: more threads are slower there.
    """

    is_limit = True
    needs = ("host.num_threads", "host.process_cpus", "host.busy_cpus", "settings.num_leaf_modules")
    actions = ("set-threads",)
    fires_on = (
        profile(host=ONE_OF_FOUR, settings=LARGE),
        profile(host=replace(BESIDE_A_WORKER, cpus=4, machine_cpus=4), settings=CHOSEN),
        profile(host=BESIDE_A_WORKER, settings=LARGE, program=timed(0.9)),
        profile(host=ONE_OF_FOUR, settings=NO_MODULE, program=timed(0.9)),
    )
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
        profile(host=replace(ONE_OF_FOUR, runnable_share=0.2), settings=LARGE),
        profile(host=BESIDE_A_WORKER, settings=CHOSEN),
        profile(host=ONE_OF_FOUR, settings=LARGE, program=timed(0.1)),
    )

    def applies(self, profile: Profile) -> bool:
        host = profile.host
        return profile.run.device == "cpu" and (host.num_threads or 0) < (host.whole_cpus or 1)

    def check(self, profile: Profile) -> Finding | None:
        host, settings = profile.host, profile.settings
        assert host.num_threads and host.whole_cpus
        idle = host.free_cpus or 0.0
        free = int(idle + 1 - LEAST_IDLE) // settings.local_processes
        then = min(host.whole_cpus, host.num_threads + free)
        if then <= host.num_threads or not has_heavy_operations(profile):
            return None
        if (host.runnable_share or 0.0) > MOST_DELAY:
            return None
        if self._is_division(profile):
            return None
        heavy = heavy_shares(profile) or {}
        # The last of the free CPUs may have some other work.
        beside = max(0.0, int(idle + 1 - LEAST_IDLE) - idle)
        alone = max(0.0, 1 - (beside / MOST_BESIDE) ** 2)
        divided = {
            phase: ns * alone * min(1.0, heavy.get(phase, 1.0) / USUAL_HEAVY)
            for phase, ns in won_by_threads(profile, host.num_threads, then).items()
        }
        total = sum(divided.values())
        if not total:
            return None
        omp = settings.omp_num_threads
        cause = f"OMP_NUM_THREADS={omp}" if omp else "OMP_NUM_THREADS is not set"
        return Finding(
            rule=self.name,
            summary=f"Torch computes on {host.num_threads} of {host.whole_cpus} CPUs, and {idle:.1f} are"
            " free",
            lost_ns={phase: WON[1] * ns for phase, ns in divided.items()},
            low_ns=WON[0] * total,
            high_ns=WON[2] * total,
            assumption="half of what it would be if three quarters of forward and backward, and a third of"
            " the optimizer, divide, and if all CPUs really compute at the same time",
            evidence=(
                f"torch.get_num_threads() is {host.num_threads} ({cause}); the process uses"
                f" {host.process_cpus:.1f} CPUs, and {idle:.1f} of {host.machine_cpus} are free to it.",
                self._heavy(profile),
                f"With CPUs that compute at the same time it would be {format_ms(total)} of each step,"
                f" {format_share(total / profile.step_time_ns)}; on some virtual machines it is nothing.",
            ),
            fix=f"Try {then} threads: only a trial tells whether they are faster here.",
            code=f"torch.set_num_threads({then})",
            actions=self.actions,
        )

    def _is_division(self, profile: Profile) -> bool:
        """Whether the script has given torch these threads, and the other CPUs to what runs beside: its
        workers, other processes of its own, its Python threads."""
        host, settings = profile.host, profile.settings
        assert host.num_threads and host.whole_cpus
        used = (host.child_cpus or 0.0) + sum(thread.cpus for thread in host.python_threads)
        if not settings.sets_threads or used < LEAST_BESIDE:
            return False
        threads = sum(thread.cpus >= LEAST_BESIDE for thread in host.python_threads)
        workers = max((loader.num_workers for loader in profile.program.loaders), default=0)
        beside = max(1, threads + workers)
        return host.num_threads + beside >= host.whole_cpus / settings.local_processes

    def _heavy(self, profile: Profile) -> str:
        """Says that operations are long enough to be divided."""
        shares = heavy_shares(profile)
        if shares is not None:
            part = format_share(shares[Phase.FORWARD])
            return f"{part} of the forward pass are operations of 80 us or more, which can be divided."
        leaf_ns = profile.phase_time_ns[Phase.FORWARD] / (profile.settings.num_leaf_modules or 1)
        return f"A module's forward takes {format_duration(leaf_ns)} on average, enough to be divided."
