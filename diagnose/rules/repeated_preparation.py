"""The same samples are prepared anew each epoch"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._supply import supply_of, won_beside
from diagnose.rules._worker_examples import A_CPU_IDLE, WELL_FED, fed_by
from diagnose.rules._worker_line import where_slow
from diagnose.rules.base import Rule

MIN_REPEATED = 2
"""Watched samples that must have come out the same; one may be a constant."""


class RepeatedPreparation(Rule):
    """
    ## What it means
    The workers compute all the time, and what they compute they have computed before: the samples watched
    came out the same, bit for bit, in every epoch. There is no CPU for more workers, or these would win a
    part of the wait only.

    ## What to do
    Do the work once: write the prepared samples to disk (one tensor per shard), or keep them in memory.
    What must differ from epoch to epoch can be done afterwards, on batches.

    ## When it is wrong
    Prepared samples that are far larger than the raw ones, so that reading them takes longer than making
    them. Where more workers would win most of the wait, that is easier: `too-few-workers`.
    """

    needs = ("input.workers", "input.steady_wait_ns", "host.cpus")
    explains = ("slow-transform", "too-few-workers")
    actions = ("loader-workers", "loader-workers-reseeded")
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"repeated": 4}),
        fed_by(data_wait_ms=50, fetch_ms=100, **{**A_CPU_IDLE, "workers": {"repeated": 4}}),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"repeated": 3, "varied": 1}),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, workers={"repeated": 4}),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return any(loader.num_workers and loader.epochs > 1 for loader in profile.program.loaders[:1])

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        supply = supply_of(profile)
        if supply is None or not supply.behind or not supply.needs_cpu or supply.cured_by_workers:
            return None
        workers = supply.workers
        if workers.repeated < MIN_REPEATED or workers.varied:
            return None
        lost_ns = supply.won_ns(busy_ns=supply.busy_ns - workers.fetch_ns * supply.batches)
        if not lost_ns:
            return None
        where = where_slow(profile, supply.loader)
        offered = won_beside(self.actions, profile, supply)
        return Finding(
            rule=self.name,
            summary=(
                "Each epoch prepares the same samples anew, and"
                f" {format_share(supply.wait_share)} of each step is spent waiting for them."
            ),
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=supply.wait_ns,
            assumption="prepared samples are read as good as for nothing",
            evidence=(
                f"{workers.repeated} watched samples came out the same in every epoch, none differently.",
                *supply.evidence(),
                *where.evidence,
            ),
            fix=f"Prepare the samples once and keep the results, on disk or in memory.{supply.or_workers}",
            file=where.file,
            line=where.line,
            actions=tuple(offered),
            won_ns=offered,
        )
