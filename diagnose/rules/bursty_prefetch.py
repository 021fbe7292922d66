"""Batches arrive in bursts, one per worker, and then the loop waits"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._loader_calls import applicable, with_loader_arguments
from diagnose.rules._supply import (
    MIN_SHARE,
    SATURATED,
    supply_of,
)
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules._worker_rule import WorkerRule

IN_BURSTS = 0.5
"""Part of the wait that must come in regular long waits."""

SLACK = 1
"""Steps by which the period may differ from the number of workers."""

MAX_TAIL = 0.2
"""With a longer tail the batches themselves differ, and the fault is `slow-samples`."""


BURSTS = {"burst_ns": 19e6, "burst_share": 0.25, "burst_period": 4}
RARE = {"burst_ns": 19e6, "burst_share": 0.02, "burst_period": 50}


class BurstyPrefetch(WorkerRule):
    """
    ## What it means
    The loop waits in every `num_workers`-th step: all workers begin a batch at the same time and finish
    at the same time. On average they are fast enough, but too few batches are prepared ahead to bridge
    the gap.

    ## What to do
    Raise `prefetch_factor`, at the cost of the memory of as many batches per worker, or add a worker.

    ## When it is wrong
    Where the workers are busy all the time: they are too few, and deeper prefetching only delays the
    wait.
    """

    min_workers = 2
    needs = ("input.workers", "input.burst_ns")
    actions = ("loader-prefetch", "loader-workers")
    explains = ("slow-samples",)
    fires_on = (
        fed_by(data_wait_ms=20, fetch_ms=200, num_workers=4, loader={"prefetch_factor": 1}, stats=BURSTS),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=20, fetch_ms=390, num_workers=4, stats=BURSTS),
        fed_by(data_wait_ms=20, fetch_ms=200, num_workers=4, stats=RARE),
    )

    def check(self, profile: Profile) -> Finding | None:
        supply, stats = supply_of(profile), profile.input
        period, burst_ns = stats.burst_period, stats.burst_ns
        if supply is None or period is None or burst_ns is None or supply.wait_share < MIN_SHARE:
            return None
        workers = supply.loader.num_workers
        if abs(period - workers / supply.batches) > SLACK or supply.load >= SATURATED:
            return None
        if burst_ns < IN_BURSTS * supply.wait_ns or (supply.workers.tail_share or 0.0) > MAX_TAIL:
            return None
        prefetch = 2 * max(2, supply.loader.prefetch_factor or 2)
        return Finding(
            rule=self.name,
            summary=f"Every {period} steps the loop waits for all {workers} workers at once:"
            f" {format_share(burst_ns / profile.step_time_ns)} of the time.",
            lost_ns={Phase.DATA_WAIT: burst_ns},
            low_ns=0.4 * burst_ns,
            high_ns=supply.wait_ns,
            assumption="enough batches are prepared ahead to bridge the gaps",
            evidence=(
                f"{format_share(burst_ns / supply.wait_ns)} of the waiting comes in one step of {period};"
                f" there are {workers} workers.",
                *supply.evidence(),
            ),
            fix=f"Prepare {prefetch} batches ahead per worker.",
            code=with_loader_arguments(profile, supply.loader, prefetch_factor=prefetch),
            file=supply.loader.file,
            line=supply.loader.line,
            actions=applicable(self.actions, supply.loader),
        )
