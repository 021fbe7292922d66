"""More workers than CPUs take the CPU from the training thread"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._cpus import delayed_share
from diagnose.rules._crowding import taken_ns
from diagnose.rules._loader_calls import applicable, with_loader_arguments
from diagnose.rules._phases import LOOP, shared
from diagnose.rules._supply import MIN_SHARE, supply_of
from diagnose.rules._worker_examples import CROWDING_A_TEAM, WELL_FED, fed_by
from diagnose.rules.base import Rule

MIN_DELAY = 0.2
"""Workers that have no CPU for a fifth of their working time have too many rivals."""

MIN_RUNNABLE = 0.05
"""Part of the time that the training thread stands in the queue for a CPU; a free machine has under 1 %."""

MIN_LOAD = 0.5
"""Part of all CPUs that the process and its workers use; with less, it is others who take them."""


def sharing(
    delay: float, on_cpu: float, *, num_workers: int = 16, fetch_ms: float = 300, **host: float
) -> Profile:
    """Two CPUs, workers that have none for so much of their time, and the training thread beside them."""
    stats = {"process_cpus": 0.8, "runnable_share": 0.3, "on_cpu_share": 0.6, **host}
    return fed_by(
        data_wait_ms=5,
        fetch_ms=fetch_ms,
        num_workers=num_workers,
        cpus=2,
        workers={"delay_share": delay, "cpu_share": on_cpu},
        host=HostStats(cpus=2, **stats),  # type: ignore[arg-type]
    )


class TooManyWorkers(Rule):
    """
    ## What it means
    The loader has more workers than the process has CPUs, the workers have to wait for a CPU, and so does
    the training thread: its own computing takes longer because of them.

    ## What to do
    Use at most one worker per CPU, less one for the training thread. The same samples are made in the same
    time by fewer processes, and memory is saved.

    ## When it is wrong
    Where other programs take the CPUs, or where workers only wait for storage and do not compute.
    """

    needs = ("input.workers.delay_share", "host.runnable_share", "host.cpus")
    actions = ("loader-workers",)
    fires_on = (
        sharing(0.7, 0.3),
        fed_by(data_wait_ms=8, fetch_ms=87, num_workers=3, loader={"iterable": True}, **CROWDING_A_TEAM),
    )
    silent_on = (
        WELL_FED,
        sharing(0.9, 0.05, process_cpus=0.4, runnable_share=0.7, on_cpu_share=0.3),
        sharing(0.5, 0.4, num_workers=2, fetch_ms=90),
        sharing(0.02, 0.05, runnable_share=0.01),
        fed_by(data_wait_ms=8, fetch_ms=87, num_workers=3, **CROWDING_A_TEAM),
    )

    def applies(self, profile: Profile) -> bool:
        cpus = profile.own_cpus
        return any(cpus is not None and loader.num_workers > cpus for loader in profile.program.loaders[:1])

    def check(self, profile: Profile) -> Finding | None:
        supply, host = supply_of(profile), profile.host
        usable = profile.own_cpus
        if supply is None or host.runnable_share is None or not usable:
            return None
        if supply.delay_share < MIN_DELAY or host.runnable_share < MIN_RUNNABLE:
            return None
        used_ns, step_ns = supply.worker_cpu_ns + supply.own_cpu_ns, supply.training_ns
        if used_ns < MIN_LOAD * usable * step_ns or not supply.takes_the_cpus:
            return None
        own_ns = sum(profile.spent_ns(phase) for phase in LOOP)
        # At best the CPUs that others leave are always in use; fewer workers cannot be faster than that.
        others = max(0.0, (host.busy_cpus or 0.0) - used_ns / step_ns)
        left = max(used_ns / step_ns, min(usable, (host.cpus or usable) - others))
        fewer = max(1, int(usable) - 1)
        if supply.worker_cpu_ns / fewer > max(supply.own_cpu_ns, used_ns / left):
            fewer = max(1, int(usable))
        least_ns = max(supply.own_cpu_ns, supply.worker_cpu_ns / fewer, used_ns / left)
        delay_ns = min(host.runnable_share * profile.step_time_ns, own_ns)
        lost_ns = min(delay_ns, step_ns - least_ns)
        assumption = f"{fewer} workers make the batches, and the CPUs are shared with nobody else"
        if supply.crowds_a_team and supply.loader.iterable:
            num_workers = supply.loader.num_workers
            lost_ns = taken_ns(supply, delayed_share(host), usable) * (1 - fewer / num_workers)
            delay_ns = max(delay_ns, lost_ns)
            assumption = f"each worker makes all of the stream, as most do, and {fewer} of them keeps up"
        if not own_ns or lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{supply.loader.num_workers} workers share {usable:g} CPUs with the training thread,"
            f" which waits for one {format_share(host.runnable_share)} of the time.",
            lost_ns=shared(profile, lost_ns),
            low_ns=0.3 * lost_ns,
            high_ns=delay_ns,
            assumption=assumption,
            evidence=(
                f"num_workers={supply.loader.num_workers}, and there are {usable:g} CPUs for the process.",
                f"They and the training process use {used_ns / step_ns:.1f} CPUs,"
                f" {format_share(supply.worker_cpu_ns / used_ns)} of that the workers.",
                f"The workers want a CPU and have none for {format_share(supply.delay_share)} of their"
                " work.",
                "The training thread is ready to run and has no CPU for"
                f" {format_share(host.runnable_share)} of the time.",
            ),
            fix=f"Use {fewer} {'worker' if fewer == 1 else 'workers'}.",
            code=with_loader_arguments(profile, supply.loader, num_workers=fewer),
            file=supply.loader.file,
            line=supply.loader.line,
            actions=applicable(self.actions, supply.loader),
        )
