"""A few slow samples hold up the batches behind them"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._phases import shared
from diagnose.rules._supply import (
    CROWDED_BOUNDS,
    MIN_SHARE,
    applicable,
    crowded_ns,
    supply_of,
    with_loader_arguments,
)
from diagnose.rules._worker_examples import CROWDED, WELL_FED, fed_by
from diagnose.rules._worker_line import where_slow
from diagnose.rules._worker_rule import WorkerRule

MIN_TAIL = 0.2
"""Part of the workers' time that slow batches must take beyond the usual."""

MAX_TAIL_BATCHES = 0.4
"""Where more of the batches are slow, slow is usual: half of them are what the others are compared with."""

TAIL_OVER_DELAY = 2.0
"""A worker without a CPU is slow too; the tail must take this many times longer than such delays."""

IN_BURSTS = 0.5
"""Part of the wait that must come in single long waits."""

CURED = 0.5
"""Part of the wait that usual batches alone would not have."""


class SlowSamples(WorkerRule):
    """
    ## What it means
    Nearly all batches are made quickly, but now and then one takes several times as long. Batches come in
    order, so the loop waits for it while those behind it are ready. Or it need not wait, and the slow
    batches take the CPUs that the model computes on.

    ## What to do
    Find the samples that take so long: huge or damaged files, long texts, a retry after an error. Clean
    them, sort by length into buckets, or let batches come out of order with `in_order=False` where the
    order does not matter. A larger `prefetch_factor` hides waits that are not too long.

    ## When it is wrong
    A machine that stops all workers at times, such as one that swaps.
    """

    needs = ("input.workers.tail_share", "input.burst_ns")
    actions = ("loader-prefetch",)
    explains = ("slow-storage", "slow-transform", "too-few-workers")
    fires_on = (
        fed_by(
            data_wait_ms=20,
            fetch_ms=60,
            workers={"median_ns": 20e6, "tail_share": 0.6, "tail_batches": 0.04, "ready_batches": 2.5},
            stats={"burst_ns": 19e6, "burst_share": 0.04},
        ),
        fed_by(
            data_wait_ms=2,
            fetch_ms=110,
            **{**CROWDED, "workers": CROWDED["workers"] | {"tail_share": 0.7, "tail_batches": 0.1}},
        ),
    )
    silent_on = (
        WELL_FED,
        fed_by(
            data_wait_ms=2,
            fetch_ms=110,
            **{**CROWDED, "workers": CROWDED["workers"] | {"tail_share": 0.7, "tail_batches": 0.5}},
        ),
        fed_by(data_wait_ms=20, fetch_ms=195, workers={"cpu_share": 0.05}),
        fed_by(
            data_wait_ms=20,
            fetch_ms=60,
            workers={"median_ns": 20e6, "tail_share": 0.3, "tail_batches": 0.04, "delay_share": 0.3},
            stats={"burst_ns": 19e6, "burst_share": 0.04},
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        supply = supply_of(profile)
        burst_ns = profile.input.burst_ns
        if supply is None or burst_ns is None:
            return None
        crowded = crowded_ns(profile, supply)
        if supply.wait_share < MIN_SHARE and not crowded:
            return None
        workers = supply.workers
        tail, slow, median_ns = workers.tail_share, workers.tail_batches, workers.median_ns
        if tail is None or slow is None or median_ns is None or slow > MAX_TAIL_BATCHES:
            return None
        # In a crowd all that a worker waits for a CPU may fall on the slow batches.
        least = MIN_TAIL + supply.delay_share if crowded else TAIL_OVER_DELAY * supply.delay_share
        if tail < max(MIN_TAIL, least):
            return None
        where = where_slow(profile, supply.loader)
        longest = f", the longest {format_duration(workers.longest_ns)}" if workers.longest_ns else ""
        making = (
            f"Half of the batches are made within {format_ms(median_ns)}; {format_share(slow)} of them take"
            f" over twice that{longest}.",
            f"These take {format_share(tail)} of the workers' time.",
        )
        if crowded:
            return Finding(
                rule=self.name,
                summary=(
                    "A few slow samples take the CPUs there are: training waits for one"
                    f" {format_share(crowded / supply.training_ns)} of the time"
                ),
                lost_ns=shared(profile, tail * crowded),
                low_ns=CROWDED_BOUNDS[0] * tail * crowded,
                high_ns=CROWDED_BOUNDS[1] * tail * crowded + supply.wait_ns,
                assumption="every batch takes as long as the usual one, and workers and model have the CPUs"
                " that they want",
                evidence=making,
                fix="Find and clean the slow samples.",
                file=where.file,
                line=where.line,
            )
        lost_ns = supply.won_ns(busy_ns=supply.busy_ns * (1 - tail))
        if burst_ns < IN_BURSTS * supply.wait_ns or lost_ns < CURED * supply.wait_ns:
            return None
        return Finding(
            rule=self.name,
            summary=(
                f"A few slow samples hold up the batches behind them: {format_share(supply.wait_share)}"
                " of each step is spent waiting."
            ),
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.6 * lost_ns,
            high_ns=supply.wait_ns,
            assumption="every batch takes as long as the usual one",
            evidence=(
                *making,
                f"{format_share(burst_ns / supply.wait_ns)} of the waiting comes in single long waits.",
            ),
            fix="Find and clean the slow samples, or let batches come as they are ready.",
            code=with_loader_arguments(profile, supply.loader, in_order=False),
            file=where.file,
            line=where.line,
            actions=applicable(self.actions, supply.loader),
        )
