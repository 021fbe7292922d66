"""One worker does most of the loading"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._supply import MIN_SHARE, supply_of
from diagnose.rules._worker_examples import WELL_FED, fed_by
from diagnose.rules._worker_rule import WorkerRule

UNEVEN = 1.5
"""The busiest worker's time, as a multiple of the mean; of two workers one that does it all has 2."""

SATURATED = 0.75
"""The busiest worker must be busy for so much of the time, or its load holds nobody up."""


class WorkerImbalance(WorkerRule):
    """
    ## What it means
    One worker has far more to do than the others, and the loop waits for it. The usual cause is an
    `IterableDataset` that does not divide its data by `get_worker_info()`, or shards of unequal size.

    ## What to do
    Divide the shards evenly: `itertools.islice(files, info.id, None, info.num_workers)`, and have at least
    as many shards as workers.

    ## When it is wrong
    A run of a few batches, in which each worker made one or two.
    """

    min_workers = 2
    needs = ("input.workers.busiest", "input.steady_wait_ns")
    explains = ("slow-samples", "slow-storage", "slow-transform", "too-few-workers")
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=4, workers={"busiest": 4.0, "idle_share": 0.75}),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=50, fetch_ms=390, num_workers=4),
        fed_by(data_wait_ms=1, fetch_ms=50, num_workers=4, workers={"busiest": 4.0}),
    )

    def check(self, profile: Profile) -> Finding | None:
        supply = supply_of(profile)
        if supply is None or supply.workers.busiest is None or supply.wait_share < MIN_SHARE:
            return None
        busiest = supply.workers.busiest
        if busiest < UNEVEN or busiest * supply.load < SATURATED:
            return None
        lost_ns = supply.won_ns(num_workers=supply.loader.num_workers)
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"One worker does {format_share(busiest / supply.loader.num_workers)} of the loading,"
            f" and {format_share(supply.wait_share)} of each step is spent waiting for it.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.6 * lost_ns,
            high_ns=supply.wait_ns,
            assumption="the same work is divided evenly among the workers",
            evidence=(
                f"The busiest worker works {busiest:.1f} times as long as the mean of"
                f" {supply.loader.num_workers}.",
                *supply.evidence(),
            ),
            fix="Divide the dataset evenly among its workers, by get_worker_info().",
            code="itertools.islice(files, get_worker_info().id, None, get_worker_info().num_workers)",
            file=supply.loader.file,
            line=supply.loader.line,
        )
