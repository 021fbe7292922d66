"""Other programs take the CPUs"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.input import InputStats, WorkerStats
from diagnose.core.profile import Profile
from diagnose.core.program import Loader, Program
from diagnose.core.units import format_share
from diagnose.rules._cpus import MOST, delayed_share, spread, won_by_threads
from diagnose.rules._examples import profile
from diagnose.rules._lines import at, waiting_share
from diagnose.rules._machine import storage_cpus
from diagnose.rules.base import Rule

MIN_DELAY = 0.05
"""The training thread waits for a CPU for this part of the time, or more."""

MIN_FOREIGN_CPUS = 0.25
"""Other programs use so many CPUs, or more: the system's own services use a tenth."""

MIN_STARTED_CPUS = 0.05
"""Processes that the script has started need no more, where it has no workers: no service is among them."""

MIN_FOREIGN_PART = 0.5
"""And this part of all that competes with the training thread, or more."""

WORST = 0.99
"""Two threads that compute together, on one free CPU, were seen to take a hundred times as long."""

SAID_CPUS = 0.1
"""CPUs that are worth a word where they are taken to be the run's own."""

QUIET_DELAY = 0.01
"""So much a thread waits for a CPU on a machine with nothing else to do."""

LEAST_NS = 2_000_000_000
"""A shorter run may have met one burst of a program that is none of its own."""

SHARED = HostStats(
    cpus=2,
    machine_cpus=2,
    num_threads=1,
    process_cpus=0.8,
    child_cpus=0.0,
    runnable_share=0.2,
    busy_cpus=2.0,
)
TEAM = replace(
    SHARED, num_threads=2, process_cpus=1.0, child_cpus=None, runnable_share=0.3, native_delay_share=0.3
)
STARTED = replace(SHARED, process_cpus=0.7, child_cpus=1.0)
"""What runs beside it are processes that the script has started."""

FROM_STORAGE = InputStats(early_read_bytes=31e6, late_read_bytes=31e6)
"""Per step of 100 ms: up to 0.8 CPUs of others are the run's own doing."""

WITH_WORKERS = Program(loaders=(Loader(num_workers=2, batch_size=8),))


class NoisyNeighbour(Rule):
    """
    ## What it means
    The training thread was ready to run, and the CPUs were running other programs, or processes that the
    script has started besides its loaders' workers. Where torch computes with several threads it is worse
    than it looks: an operation waits for the one thread that has no CPU.

    ## What to do
    Move the other program, or give each its own CPUs: a cpuset, a reservation of the scheduler, `taskset`.
    As long as it runs, no more threads than there are CPUs left may be faster, by far: they do not wait for
    the one that has none. `diagnose run --tune --only set-threads` tries it.

    ## When it is wrong
    It is seldom the script's fault. The figures of this run are those of this machine at this time. Nobody
    tells whom threads of the kernel work for: where the run reads much from storage, as much as that takes
    of them is taken to be its own, and what is left of the others must be enough.
    """

    needs = ("host.runnable_share", "host.process_cpus", "foreign_cpus")
    explains = ("step-jitter",)
    residual = True
    of_host = True
    fires_on = (
        profile(host=SHARED),
        profile(host=TEAM),
        profile(host=STARTED),
        profile(host=STARTED, steps=15),
        profile(host=SHARED, input=replace(FROM_STORAGE, late_read_bytes=1e6)),
        profile(host=replace(SHARED, machine_cpus=4, busy_cpus=3.0), input=FROM_STORAGE),
        profile(host=replace(SHARED, kernel_cpus=0.1), input=FROM_STORAGE),
    )
    silent_on = (
        profile(host=replace(SHARED, runnable_share=0.02)),
        profile(host=replace(SHARED, busy_cpus=1.0)),
        profile(host=SHARED, steps=15),
        profile(host=SHARED, input=FROM_STORAGE),
        profile(host=replace(STARTED, busy_cpus=1.8), where=(at("pipe.send(state)", 0.2, "wait"),)),
        profile(
            host=STARTED,
            program=WITH_WORKERS,
            input=InputStats(
                batches_per_step=1.0,
                workers=WorkerStats(
                    num_workers=2,
                    batches=500,
                    fetch_ns=90e6,
                    collate_ns=5e6,
                    send_ns=1e6,
                    cpu_share=0.95,
                    idle_share=0.1,
                ),
            ),
        ),
    )

    def applies(self, profile: Profile) -> bool:
        host = profile.host
        return host.quota_cpus is None and (host.num_threads or 1) <= (host.machine_cpus or 1)

    def check(self, profile: Profile) -> Finding | None:
        host = profile.host
        assert host.runnable_share is not None and profile.foreign_cpus is not None
        started, delayed, runnable = _started_cpus(profile), delayed_share(host), host.runnable_share
        reading = storage_cpus(profile)  # as much of theirs as can be this run's own doing
        foreign = profile.foreign_cpus - reading + started
        if started and foreign - started < MIN_FOREIGN_CPUS:
            # What it has started and waits for works while it waits: that is `blocking-call`'s.
            waited = waiting_share(profile)
            delayed, runnable = max(0.0, delayed - waited), max(0.0, runnable - waited)
        own = reading + (host.child_cpus or 0.0) - started
        own += sum(thread.cpus for thread in host.python_threads)
        own += sum(rank.used_cpus or 0.0 for rank in profile.neighbours)
        part = foreign / (foreign + own) if foreign else 0.0
        if (
            (delayed if started else runnable) < MIN_DELAY
            or (foreign < MIN_FOREIGN_CPUS and not started)
            or part < MIN_FOREIGN_PART
            or (profile.steps.total_time_ns < LEAST_NS and not started)
        ):
            return None
        lost = spread(profile, part * delayed)
        total = sum(lost.values())
        low = part * min(max(0.0, runnable - QUIET_DELAY), MOST) * profile.step_time_ns
        threads = host.num_threads or 1
        evidence = [
            f"The training thread was ready to run and had no CPU for"
            f" {format_share(host.runnable_share)} of the time.",
            f"Other programs used {foreign:.1f} of {host.machine_cpus} CPUs, this one"
            f" {host.process_cpus:.1f} with {threads} thread{'s' * (threads != 1)} to compute with.",
        ]
        if started:
            evidence.append(f"Of these, processes that the script itself has started used {started:.1f}.")
        if host.stolen_cpus:
            evidence.append(f"Of these, other guests of the machine's host took {host.stolen_cpus:.2f}.")
        if reading >= SAID_CPUS:
            evidence.append(f"Up to {reading:.1f} more may have read from storage what this run asked for.")
        fewer = _threads_left(profile, foreign, total)
        return Finding(
            rule=self.name,
            summary=f"Other programs use {foreign:.1f} of {host.machine_cpus} CPUs, and training waits"
            f" for its turn for {format_share(delayed)} of the time",
            lost_ns=lost,
            low_ns=min(low, total),
            high_ns=max(total, min(1.3 * total, WORST * profile.step_time_ns)),
            assumption="without the other programs neither the training thread nor torch's other threads"
            " would wait for a CPU",
            evidence=tuple(evidence),
            fix="Move the other programs to another machine, or to CPUs of their own."
            + (
                f" While they run, {fewer} instead of {host.num_threads} threads may help." if fewer else ""
            ),
            code=f"torch.set_num_threads({fewer})" if fewer else "",
        )


def _threads_left(profile: Profile, foreign: float, waited_ns: float) -> int:
    """Returns for how many of torch's threads the others leave a CPU, where all of them wait longer than so
    few would compute; 0 elsewhere."""
    host = profile.host
    if profile.run.device != "cpu" or not host.machine_cpus or not host.num_threads:
        return 0
    left = max(1, int((host.machine_cpus - foreign) / profile.settings.local_processes))
    if left >= host.num_threads:
        return 0
    return left if waited_ns > sum(won_by_threads(profile, left, host.num_threads).values()) else 0


def _started_cpus(profile: Profile) -> float:
    """CPUs that children of the process used which load nothing; 0 where loaders may explain them."""
    workers, children = profile.input.workers, profile.host.child_cpus or 0.0
    if sum(loader.num_workers > 0 for loader in profile.program.loaders) > (workers is not None):
        return 0.0  # nobody knows what the workers of the others took
    if workers is not None and profile.step_time_ns:
        batch_ns = (workers.fetch_ns + workers.collate_ns) * workers.cpu_share + workers.send_ns
        batch_ns += workers.helper_ns or 0.0
        children -= batch_ns * (profile.input.batches_per_step or 1.0) / profile.step_time_ns
    has_workers = any(loader.num_workers > 0 for loader in profile.program.loaders)
    return children if children >= (MIN_FOREIGN_CPUS if has_workers else MIN_STARTED_CPUS) else 0.0
