"""Preparing samples takes more CPU time than there is"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms, format_share
from diagnose.rules._crowding import CROWDED_BOUNDS, crowded_by_ns, crowded_ns
from diagnose.rules._phases import shared
from diagnose.rules._supply import MORE_WORKERS, Supply, supply_of, won_beside
from diagnose.rules._worker_examples import (
    A_CPU_IDLE,
    BESIDE_A_TEAM,
    CROWDED,
    CROWDING_A_TEAM,
    WELL_FED,
    fed_by,
)
from diagnose.rules._worker_line import where_slow
from diagnose.rules._worker_rule import WorkerRule

BY_HELPERS = 0.25
"""Part of the CPU time of making a batch that helper threads take; below it they hardly matter."""


class SlowTransform(WorkerRule):
    """
    ## What it means
    The workers compute all the time and the loop still waits, and there are no CPUs left for more workers:
    decoding and transforming the samples is more work than this machine can do beside the model. Or more
    workers would win a part of the wait, but most of their time is a transform's, what is done to a sample
    once it has been read, and a cheaper one would win all of it. Or they keep up, and the model computes
    slower for it, as there are not enough CPUs for both.

    ## What to do
    Make the transform cheaper at the line named below: a faster decoder, smaller images on disk, vectorised
    code, a cache of what comes out the same each epoch, or augmentation on the accelerator. Where libraries
    compute in threads of their own in each worker, as BLAS, OpenCV and decoders do, let them use one. Where
    a CPU stands idle, more workers win a part of the wait meanwhile.

    ## When it is wrong
    When another program on the machine takes the CPUs. Where further workers would cure the wait, or win a
    third of it and no transform takes most of their time, the fault is `too-few-workers`; where the
    training thread loads, it is `serial-loading`.
    """

    needs = ("input.workers", "input.steady_wait_ns", "host.cpus")
    explains = ("too-few-workers",)
    actions = MORE_WORKERS
    fires_on = (
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2),
        fed_by(data_wait_ms=40, fetch_ms=380, num_workers=4, cpus=4),
        fed_by(data_wait_ms=40, fetch_ms=780, num_workers=8, cpus=8, workers={"ready_batches": 3.5}),
        fed_by(data_wait_ms=10, fetch_ms=110, **CROWDED),
        fed_by(data_wait_ms=8, fetch_ms=87, **CROWDING_A_TEAM),
        fed_by(data_wait_ms=8, fetch_ms=87, num_workers=3, **CROWDING_A_TEAM),
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"cpu_share": 0.3, "helper_ns": 150e6}),
        fed_by(data_wait_ms=50, fetch_ms=100, **{**A_CPU_IDLE, "workers": {"transform_share": 0.7}}),
    )
    silent_on = (
        WELL_FED,
        fed_by(data_wait_ms=50, fetch_ms=200, cpus=2, workers={"cpu_share": 0.05}),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1),
        fed_by(data_wait_ms=50, fetch_ms=100, num_workers=1, workers={"transform_share": 0.7}),
        fed_by(data_wait_ms=50, fetch_ms=100, **A_CPU_IDLE),
        fed_by(data_wait_ms=50, fetch_ms=100, **{**A_CPU_IDLE, "workers": {"transform_share": 0.2}}),
        fed_by(data_wait_ms=10, fetch_ms=50, **CROWDED),
        fed_by(data_wait_ms=6, fetch_ms=52, **BESIDE_A_TEAM),
        fed_by(data_wait_ms=8, fetch_ms=46, **CROWDING_A_TEAM),
        fed_by(data_wait_ms=8, fetch_ms=87, num_workers=3, loader={"iterable": True}, **CROWDING_A_TEAM),
        fed_by(
            data_wait_ms=10, fetch_ms=110, **{**CROWDED, "host": HostStats(cpus=8, runnable_share=0.15)}
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        supply = supply_of(profile)
        if supply is None or not supply.needs_cpu:
            return None
        crowded = crowded_ns(profile, supply)
        if crowded:  # workers that keep up beside a model that takes more are what they are for
            return self._crowding(profile, supply, crowded) if supply.takes_the_cpus else None
        if not supply.behind or supply.cured_by_workers:
            return None
        helped = supply.helped_by_workers
        if helped and not supply.in_transforms:
            return None
        where = where_slow(profile, supply.loader)
        won_ns, offered = supply.won_by_workers_ns, won_beside(self.actions, profile, supply)
        slow = (
            "Transforms of the samples keep the workers behind:"
            if helped
            else "Preparing samples takes the CPUs there are, and still"
        )
        return Finding(
            rule=self.name,
            summary=f"{slow} {format_share(supply.wait_share)} of each step is spent waiting for a batch.",
            lost_ns={Phase.DATA_WAIT: supply.wait_ns},
            low_ns=0.5 * supply.wait_ns,
            high_ns=supply.wait_ns,
            assumption="the transform becomes cheap enough for these workers to keep up",
            evidence=(
                *supply.evidence(),
                _on_cpu(supply),
                *_in_transforms(supply),
                f"There are {supply.cpus:g} CPUs for the process: more workers would win"
                f" {f'{format_ms(won_ns)} of the wait' if won_ns else 'nothing'}.",
                *_by_helpers(supply),
                *where.evidence,
            ),
            fix=f"Make preparing a sample cheaper{where.at}.{supply.or_workers}",
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
            summary="Preparing samples takes the CPUs there are: training waits for one"
            f" {format_share(crowded / supply.training_ns)} of the time",
            lost_ns=shared(profile, lost_ns),
            low_ns=CROWDED_BOUNDS[0] * lost_ns,
            high_ns=CROWDED_BOUNDS[1] * lost_ns + supply.wait_ns,
            assumption="the transform becomes so cheap that workers and model have the CPUs they want",
            evidence=(
                *supply.evidence(),
                _on_cpu(supply),
                *_by_helpers(supply),
                *where.evidence,
            ),
            fix=f"Make preparing a sample cheaper{where.at}.{_or_fewer(supply)}",
            file=where.file,
            line=where.line,
        )


def _or_fewer(supply: Supply) -> str:
    """Says so where there are more workers than CPUs: each may do anew what others have done."""
    if not supply.cpus or supply.loader.num_workers <= supply.cpus:
        return ""
    fewer = max(1, int(supply.cpus) - 1)
    return (
        f" Try {fewer} {'worker' if fewer == 1 else 'workers'} instead of {supply.loader.num_workers}, too:"
        " what each of them keeps of earlier samples is made by each anew."
    )


def _on_cpu(supply: Supply) -> str:
    return (
        f"Workers are on a CPU for {format_share(supply.workers.cpu_share)} of that time and wait for one"
        f" for {format_share(supply.delay_share)}."
    )


def _in_transforms(supply: Supply) -> tuple[str, ...]:
    """Says what part of the workers' time is the transforms', where it is most."""
    if not supply.in_transforms:
        return ()
    return (
        f"Transforms of the samples take {format_share(supply.workers.transform_share or 0.0)} of the"
        " workers' time.",
    )


def _by_helpers(supply: Supply) -> tuple[str, ...]:
    """Says what helper threads take, where it is much."""
    workers = supply.workers
    helper_ns = workers.helper_ns or 0.0
    own_ns = (workers.fetch_ns + workers.collate_ns) * workers.cpu_share
    if helper_ns < BY_HELPERS * (own_ns + helper_ns):
        return ()
    return (
        f"Threads of libraries in each worker take {format_ms(helper_ns)} of CPU time for a batch, beside"
        f" the worker's own {format_ms(own_ns)}. Let them use one thread there: OMP_NUM_THREADS=1, or in"
        " worker_init_fn cv2.setNumThreads(0) or threadpoolctl.threadpool_limits(1).",
    )
