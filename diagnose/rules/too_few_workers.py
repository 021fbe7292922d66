"""The loader has too few workers to keep up"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms, format_share
from diagnose.rules._loader_calls import DIVIDE, applicable, with_loader_arguments
from diagnose.rules._supply import (
    MORE_WORKERS,
    supply_of,
)
from diagnose.rules._worker_examples import A_CPU_IDLE, WELL_FED, fed_by
from diagnose.rules._worker_line import where_slow
from diagnose.rules._worker_rule import WorkerRule


class TooFewWorkers(WorkerRule):
    """
    ## What it means
    Every worker is busy all the time, the queue of finished batches is empty when the loop asks, and there
    are CPUs left that further workers could use. A wait in every `num_workers`-th step is the same fault.
    So it is where the CPUs are too few for more workers to take all of the wait away, if they win a third
    of it at least: one number is changed sooner than the samples are made cheaper.

    ## What to do
    Give the loader more workers, at most about one per CPU. Each costs memory for its prefetched batches.

    ## When it is wrong
    Where the CPUs are used up by others, or where the storage is at its limit: more workers then only wait
    for one another. With as many workers as CPUs it is `slow-transform` or `slow-storage` instead, and
    likewise where a transform takes most of the workers' time and they would win less of the wait than a
    cheaper one. A stream of few shards feeds no more workers than it has shards.
    """

    needs = ("input.workers", "input.steady_wait_ns")
    actions = MORE_WORKERS
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1),
        fed_by(data_wait_ms=20, fetch_ms=195, workers={"cpu_share": 0.05}),
        fed_by(data_wait_ms=50, fetch_ms=390, num_workers=4, workers={"ready_batches": 1.5}),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, loader={"iterable": True}),
        fed_by(data_wait_ms=50, fetch_ms=100, **A_CPU_IDLE),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2),
        fed_by(data_wait_ms=50, fetch_ms=200, host=HostStats(cpus=64, process_cpus=1.0, quota_cpus=2.0)),
        fed_by(data_wait_ms=50, fetch_ms=20, workers={"ready_batches": 3.0}),
        fed_by(
            data_wait_ms=50, fetch_ms=390, num_workers=4, workers={"ready_batches": 4.5, "idle_share": 0.2}
        ),
        fed_by(
            data_wait_ms=50,
            fetch_ms=100,
            num_workers=1,
            loader={"iterable": True},
            workers={"cpu_share": 0.4},
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        supply = supply_of(profile)
        if supply is None or not supply.behind or not supply.helped_by_workers or supply.waits_for_storage:
            return None
        workers = supply.enough_workers()
        lost_ns = supply.won_ns(num_workers=workers)
        loader = supply.loader
        then_ns = supply.wait_ns - lost_ns
        cheaper = where_slow(profile, loader) if not supply.cured_by_workers else None
        return Finding(
            rule=self.name,
            summary=f"{loader.num_workers} {'worker does' if loader.num_workers == 1 else 'workers do'} not"
            f" keep up: {format_share(supply.wait_share)} of each step is spent waiting for a batch.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.6 * lost_ns,
            high_ns=supply.wait_ns,
            assumption=f"{workers} workers make batches as fast as now, each on its own CPU if need be",
            evidence=(
                *supply.evidence(),
                "The workers compute."
                if supply.needs_cpu
                else "The workers mostly wait for data themselves.",
                *((f"There are {supply.cpus:g} CPUs for the process.",) if supply.cpus else ()),
                *(cheaper.evidence if cheaper else ()),
            ),
            fix=f"{DIVIDE if loader.iterable else 'Give'} the DataLoader {workers} workers instead of"
            f" {loader.num_workers}."
            + (
                f" The loop would still wait {format_ms(then_ns)}, as workers and model share the CPUs:"
                f" make preparing a sample cheaper{cheaper.at}, too."
                if cheaper
                else ""
            ),
            code="" if loader.iterable else with_loader_arguments(profile, loader, num_workers=workers),
            file=loader.file,
            line=loader.line,
            actions=() if profile.input.asked_aside else applicable(self.actions, loader),
        )
