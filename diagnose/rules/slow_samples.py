"""A few slow samples hold up the batches behind them"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._crowding import CROWDED_BOUNDS, crowded_by_ns, crowded_ns
from diagnose.rules._loader_calls import applicable, with_loader_arguments
from diagnose.rules._machine import waits_for_disk
from diagnose.rules._own_loading import MOSTLY, LoadingRule, has_come_to_keep, may_only_read
from diagnose.rules._phases import shared
from diagnose.rules._serial import CAUSE_ACTIONS, Serial, serial_of, takes_rewriting, where_loading
from diagnose.rules._serial_examples import ON_BOTH_CPUS, ON_ONE_CPU, loading, pieces, prepared
from diagnose.rules._supply import MIN_SHARE, main_loader, supply_of
from diagnose.rules._worker_examples import WELL_FED, crowded_by, fed_by
from diagnose.rules._worker_line import where_slow

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

MIN_BURSTS = 4
"""Long waits of the training thread, at least; fewer may be a machine that stood still."""

PREFETCH = ("loader-prefetch",)
REPEATED = "repeated-preparation"

BURSTS = {"burst_ns": 30e6, "burst_share": 0.1}
"""Of 40 ms, in a tenth of the steps."""

STANDS_STILL = replace(ON_BOTH_CPUS, process_cpus=0.6, on_cpu_share=0.62)


class SlowSamples(LoadingRule):
    """
    ## What it means
    Nearly all batches are made quickly, but now and then one takes several times as long. Batches come in
    order, so the loop waits for it while those behind it are ready. Or it need not wait, and the slow
    batches take the CPUs that the model computes on.

    Without workers the training thread makes each batch itself, and stands still over the slow ones: the
    fault is named so where half of its loading or more comes in single long waits, which do not come
    regularly. Where it stands still because files are read, the storage is slow, not these samples.

    The readings that it needs, below, are of workers. Without any it needs `input.burst_ns` and
    `input.burst_share`.

    ## What to do
    Find the samples that take so long: huge or damaged files, long texts, a retry after an error. Clean
    them, sort by length into buckets, or let batches come out of order with `in_order=False` where the
    order does not matter. A larger `prefetch_factor` hides waits that are not too long.

    ## When it is wrong
    A machine that stops all workers, or the loop, at times, such as one that swaps. A dataset that reads a
    shard now and then, at no regular times, and hands out its samples one by one.
    """

    needs = ("input.workers.tail_share", "input.burst_ns")
    own_needs = ("input.steady_wait_ns", "input.burst_ns", "input.burst_share")
    actions = (*PREFETCH, *CAUSE_ACTIONS)
    explains = (REPEATED, "serial-loading", "slow-storage", "slow-transform", "too-few-workers")
    fires_on = (
        fed_by(
            data_wait_ms=20,
            fetch_ms=60,
            workers={"median_ns": 20e6, "tail_share": 0.6, "tail_batches": 0.04, "ready_batches": 2.5},
            stats={"burst_ns": 19e6, "burst_share": 0.04},
        ),
        fed_by(data_wait_ms=2, fetch_ms=110, **crowded_by(tail_share=0.7, tail_batches=0.1)),
        loading(40, stats=BURSTS),
        loading(40, stats=BURSTS, own=prepared()),
        loading(40, stats=BURSTS, host=ON_ONE_CPU),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=2, fetch_ms=110, **crowded_by(tail_share=0.7, tail_batches=0.5)),
        fed_by(data_wait_ms=20, fetch_ms=195, workers={"cpu_share": 0.05}),
        fed_by(
            data_wait_ms=20,
            fetch_ms=60,
            workers={"median_ns": 20e6, "tail_share": 0.3, "tail_batches": 0.04, "delay_share": 0.3},
            stats={"burst_ns": 19e6, "burst_share": 0.04},
        ),
        loading(40, stats={"burst_ns": 15e6, "burst_share": 0.1}),
        loading(40, stats={"burst_ns": 30e6, "burst_share": 0.5}),
        loading(40, stats={"burst_ns": 30e6, "burst_share": 0.004}),
        loading(40, stats={**BURSTS, "burst_period": 10}),
        loading(40, stats={**BURSTS, "late_wait_ns": 10e6}),
        loading(40, stats={**BURSTS, "fetch_ns": 1e6, "collate_ns": 39e6}),
        loading(40, stats={**BURSTS, "own_drawing_ns": 25e6}),
        loading(40, stats=BURSTS, own=pieces()),
        loading(40, stats=BURSTS, own=pieces(reads=96.0), host=STANDS_STILL),
        loading(40, stats=BURSTS, host=replace(STANDS_STILL, iowait_cpus=0.5)),
        loading(40, stats=BURSTS, loader={"iterable": True}),
        loading(40, stats=BURSTS, host=replace(ON_BOTH_CPUS, runnable_share=0.2)),
        loading(3, stats={"burst_ns": 2.5e6, "burst_share": 0.1}),
    )

    def applies(self, profile: Profile) -> bool:
        return main_loader(profile) is not None

    def explained(self, finding: Finding, profile: Profile) -> tuple[str, ...]:
        """See `Rule.explained`. What workers prepare anew may be slow and the same again: both are told."""
        loader = main_loader(profile)
        of_workers = loader is not None and loader.num_workers > 0
        return tuple(name for name in self.explains if not (of_workers and name == REPEATED))

    def check(self, profile: Profile) -> Finding | None:
        serial = serial_of(profile)
        if serial is not None:
            return None if takes_rewriting(profile, serial.loader) else self._alone(profile, serial)
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
            crowding_ns = crowded_by_ns(profile, supply, tail * supply.making_cpu_ns)
            if not crowding_ns:
                return None
            return Finding(
                rule=self.name,
                summary="A few slow samples take the CPUs there are: training waits for one"
                f" {format_share(crowded / supply.training_ns)} of the time",
                lost_ns=shared(profile, crowding_ns),
                low_ns=CROWDED_BOUNDS[0] * crowding_ns,
                high_ns=CROWDED_BOUNDS[1] * crowding_ns + supply.wait_ns,
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
            summary=f"A few slow samples hold up the batches behind them: {format_share(supply.wait_share)}"
            " of each step is spent waiting.",
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
            actions=applicable(PREFETCH, supply.loader),
        )

    def _alone(self, profile: Profile, serial: Serial) -> Finding | None:
        """Of a training thread that makes the samples itself."""
        stats, step_ns = profile.input, serial.step_ns
        # Any of the drawing may come in the long waits.
        burst_ns = max(0.0, (stats.burst_ns or 0.0) - (stats.own_drawing_ns or 0.0))
        bursts = stats.burst_share
        if not burst_ns or not bursts or bursts > MAX_TAIL_BATCHES or stats.main_wait_share < 1:
            return None
        if bursts * profile.steps.measured < MIN_BURSTS or burst_ns < IN_BURSTS * serial.wait_ns:
            return None
        if stats.burst_period is not None or has_come_to_keep(profile, serial):
            return None  # shards that are read, or what is kept from then on
        if _stands_reading(profile, serial):
            return None  # nothing is wrong with these samples: the next time it will be others
        if (stats.collate_ns or 0.0) > (stats.fetch_ns or 0.0):
            return None  # it is not the samples that take the time
        delayed_ns = (profile.host.runnable_share or 0.0) * step_ns
        lost_ns = min(burst_ns, serial.lost_ns)
        if lost_ns < MIN_SHARE * step_ns or burst_ns < TAIL_OVER_DELAY * delayed_ns:
            return None
        where, offered = where_loading(profile, serial.loader), serial.won_by(profile)
        return Finding(
            rule=self.name,
            summary=f"A few slow samples hold up the loop, which loads them itself:"
            f" {format_share(lost_ns / step_ns)} of each step.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.6 * lost_ns,
            high_ns=serial.wait_ns,
            assumption="every batch takes as long as the usual one",
            evidence=(
                *serial.evidence(profile),
                f"{format_share(bursts)} of the steps wait {format_ms(burst_ns / bursts)} longer than usual"
                f" for their batch, and that is {format_share(burst_ns / serial.wait_ns)} of the waiting.",
                *serial.whether_it_computes(profile),
                *where.evidence,
            ),
            fix=f"Find and clean the slow samples.{serial.or_workers}",
            file=where.file,
            line=where.line,
            actions=CAUSE_ACTIONS if offered else (),
            won_ns=offered,
        )


def _stands_reading(profile: Profile, serial: Serial) -> bool:
    """Whether the training thread reads files for most of its loading, and either that is all it does or it
    stands still meanwhile: storage that is slow at times, whichever sample is asked for. What waits for a
    disk may read mapped files, by no call."""
    if serial.waits and waits_for_disk(profile.host):
        return True
    own = profile.input.own
    if own is None or not own.reads or own.reading_share is None or own.reading_share < MOSTLY:
        return False
    return serial.waits or may_only_read(own, serial, profile)
