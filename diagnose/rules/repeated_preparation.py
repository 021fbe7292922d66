"""The same samples are prepared anew each epoch"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_share
from diagnose.rules._crowding import CROWDED_BOUNDS, crowded_by_ns, crowded_ns
from diagnose.rules._own_loading import MAX_BYTE_NS, LoadingRule, has_come_to_keep, may_only_read
from diagnose.rules._phases import shared
from diagnose.rules._serial import CAUSE_ACTIONS, Serial, has_other_cause, serial_of, where_loading
from diagnose.rules._serial_examples import ON_ONE_CPU, loading, pieces, prepared
from diagnose.rules._supply import (
    MORE_WORKERS,
    Supply,
    main_loader,
    supply_of,
    won_beside,
)
from diagnose.rules._worker_examples import A_CPU_IDLE, WELL_FED, crowded_by, fed_by
from diagnose.rules._worker_line import where_slow

MIN_REPEATED = 2
"""Watched samples that must have come out the same; one may be a constant."""

MIN_SAMPLE_NS = 40_000
"""Of the time of the training thread, or of a worker that keeps up, for each sample; to take one that is
prepared out of memory takes from 2 to 40 us, by the number of its parts."""

COPY_BYTE_NS = 1.0
"""Of it for each byte of the batch: to copy what is there as it is handed out takes 0.1 to 0.6."""

READ_FOR_NOTHING = "prepared samples are read as good as for nothing"
PREPARE_ONCE = "Prepare the samples once and keep the results, on disk or in memory."


class RepeatedPreparation(LoadingRule):
    """
    ## What it means
    The workers compute all the time, and what they compute they have computed before: the samples watched
    came out the same, bit for bit, in every epoch. There is no CPU for more workers, or these would win a
    part of the wait only; or they keep up, and the model waits for a CPU. Or there are no workers, and the
    training thread does so, where workers would not win most of what that takes: there is no CPU for them.
    Samples that are only read, or copied out of what is in memory, are prepared already.

    The readings that it needs, below, are of workers. Without any it needs `input.own` and
    `input.fetch_ns`.

    ## What to do
    Do the work once: write the prepared samples to disk (one tensor per shard), or keep them in memory.
    What must differ from epoch to epoch can be done afterwards, on batches.

    ## When it is wrong
    Prepared samples that are far larger than the raw ones, so that reading them takes longer than making
    them. Where more workers would win most of the wait, that is easier: `too-few-workers`, or
    `serial-loading` where there are none.
    """

    needs = ("input.workers", "input.steady_wait_ns", "host.cpus")
    own_needs = ("input.own", "input.fetch_ns")
    explains = ("serial-loading", "slow-transform", "too-few-workers")
    actions = CAUSE_ACTIONS
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"repeated": 4}),
        fed_by(data_wait_ms=50, fetch_ms=100, **{**A_CPU_IDLE, "workers": {"repeated": 4}}),
        fed_by(data_wait_ms=10, fetch_ms=110, **crowded_by(repeated=4)),
        loading(40, own=prepared()),
        loading(40, own=pieces(reads=96.0, repeated=4)),
        loading(40, own=prepared(read_bytes=4e6, made_bytes=19e6)),
        loading(1.9, step_ms=10, own=prepared()),
    )
    silent_on = (
        WELL_FED,
        loading(40, own=prepared(repeated=1)),
        loading(40, own=prepared(varied=1)),
        loading(40, own=pieces(repeated=4)),
        loading(40, own=prepared(samples=1024.0)),
        loading(40, own=prepared(reads=64.0, read_bytes=40e6)),
        loading(40, own=prepared(made_bytes=80e6)),
        loading(40, own=prepared(), stats={"late_wait_ns": 1e6}),
        loading(40, own=prepared(), host=ON_ONE_CPU),
        loading(3, own=prepared()),
        loading(1.2, step_ms=10, own=prepared()),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"repeated": 3, "varied": 1}),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2),
        fed_by(data_wait_ms=10, fetch_ms=110, **crowded_by(repeated=3, varied=1)),
        fed_by(data_wait_ms=10, fetch_ms=50, **crowded_by(repeated=4)),
        fed_by(data_wait_ms=10, fetch_ms=110, loader={"batch_size": 4096}, **crowded_by(repeated=4)),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, workers={"repeated": 4}),
    )

    def applies(self, profile: Profile) -> bool:
        loader = main_loader(profile)
        if loader is None or loader.epochs < 2:
            return False
        return loader.num_workers > 0 or has_other_cause(profile, short=True)

    def check(self, profile: Profile) -> Finding | None:
        serial = serial_of(profile, short=True)
        if serial is not None:
            return self._alone(profile, serial) if has_other_cause(profile, short=True) else None
        supply = supply_of(profile)
        if supply is None or not supply.needs_cpu:
            return None
        workers = supply.workers
        if workers.repeated < MIN_REPEATED or workers.varied:
            return None
        crowded = crowded_ns(profile, supply)
        if crowded:
            dear = workers.fetch_ns >= MIN_SAMPLE_NS * (supply.loader.batch_size or 1)
            return self._crowding(profile, supply, crowded) if dear and supply.takes_the_cpus else None
        if not supply.behind or supply.cured_by_workers:
            return None
        lost_ns = supply.won_ns(busy_ns=supply.busy_ns - workers.fetch_ns * supply.batches)
        if not lost_ns:
            return None
        where = where_slow(profile, supply.loader)
        offered = won_beside(MORE_WORKERS, profile, supply)
        return Finding(
            rule=self.name,
            summary="Each epoch prepares the same samples anew, and"
            f" {format_share(supply.wait_share)} of each step is spent waiting for them.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=supply.wait_ns,
            assumption=READ_FOR_NOTHING,
            evidence=(_came_again(workers.repeated), *supply.evidence(), *where.evidence),
            fix=f"{PREPARE_ONCE}{supply.or_workers}",
            file=where.file,
            line=where.line,
            actions=tuple(offered),
            won_ns=offered,
        )

    def _crowding(self, profile: Profile, supply: Supply, crowded: float) -> Finding | None:
        """Of workers that keep up, and take the CPUs for that."""
        lost_ns = crowded_by_ns(profile, supply, supply.fetching_cpu_ns)
        if not lost_ns:
            return None
        where = where_slow(profile, supply.loader)
        return Finding(
            rule=self.name,
            summary="Each epoch prepares the same samples anew, and that takes the CPUs there are: training"
            f" waits for one {format_share(crowded / supply.training_ns)} of the time.",
            lost_ns=shared(profile, lost_ns),
            low_ns=CROWDED_BOUNDS[0] * lost_ns,
            high_ns=CROWDED_BOUNDS[1] * lost_ns + supply.wait_ns,
            assumption=READ_FOR_NOTHING,
            evidence=(_came_again(supply.workers.repeated), *supply.evidence(), *where.evidence),
            fix=PREPARE_ONCE,
            file=where.file,
            line=where.line,
        )

    def _alone(self, profile: Profile, serial: Serial) -> Finding | None:
        """Of a training thread that prepares the samples itself."""
        own, fetch_ns = profile.input.own, profile.input.fetch_ns
        if own is None or fetch_ns is None or own.repeated < MIN_REPEATED or own.varied:
            return None
        samples = own.samples or serial.loader.batch_size
        handed_ns = max(MAX_BYTE_NS * (own.read_bytes or 0.0), COPY_BYTE_NS * (own.made_bytes or 0.0))
        if not samples or fetch_ns < max(MIN_SAMPLE_NS * samples, handed_ns):
            return None
        if may_only_read(own, serial, profile) or has_come_to_keep(profile, serial):
            return None
        lost_ns = min(fetch_ns * (profile.input.batches_per_step or 1.0), serial.wait_ns)
        if lost_ns <= serial.won_ns:
            return None  # workers win more
        where, offered = where_loading(profile, serial.loader), serial.won_by(profile)
        return Finding(
            rule=self.name,
            summary="Each epoch prepares the same samples anew, on the training thread:"
            f" {format_share(lost_ns / serial.step_ns)} of each step.",
            lost_ns={Phase.DATA_WAIT: lost_ns},
            low_ns=0.5 * lost_ns,
            high_ns=serial.wait_ns,
            assumption=READ_FOR_NOTHING,
            evidence=(
                _came_again(own.repeated),
                *serial.evidence(profile),
                *serial.whether_it_computes(profile),
                *where.evidence,
            ),
            fix=f"{PREPARE_ONCE}{serial.or_workers}",
            file=where.file,
            line=where.line,
            actions=("dataset-cache",) if serial.is_short else self.actions if offered else (),
            won_ns=offered,
        )


def _came_again(repeated: int) -> str:
    return f"{repeated} watched samples came out the same in every epoch, none differently."
