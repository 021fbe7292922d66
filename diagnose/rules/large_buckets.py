"""DDP waits for nearly all gradients before it sends any"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.parallel import Ddp
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._reductions import BUCKET_BYTES, made_without, reduces_in
from diagnose.rules.base import Rule

MIN_TIMES_MORE = 2
"""A bucket up to twice the default hides about as much."""

MIN_LARGEST = 0.6
"""Part of all gradients in one bucket: its reduction cannot begin before its last gradient is there."""

HIDDEN = 0.8
"""Part of the backward pass in which a reduction can hide: the first bucket has to fill."""

MAX_OVERLAP = 0.3
"""Part of the reduction that is hidden already, above which buckets are not the fault."""

MIN_SHARE = 0.04

MAX_RUNNABLE_SHARE = 0.15
"""A training thread that waits longer than this for a CPU leaves none to send with while it computes: on
two busy CPUs the default was as slow as one bucket over gloo, now a third slower and now a sixth faster."""

LOW, HIGH = 0.4, 1.2
"""Sending while computing slows both down, on a CPU above all."""


def buckets(cap_bytes: int, bucket_bytes: tuple[int, ...], comm_ms: float = 30) -> Program:
    ddp = Ddp(
        world_size=2,
        backend="gloo",
        bucket_cap_bytes=cap_bytes,
        bucket_bytes=bucket_bytes,
        param_bytes=sum(bucket_bytes),
        comm_ns=comm_ms * 1e6,
        overlap_ns=0.0 if len(bucket_bytes) < 4 else 0.8e6 * comm_ms,
        compute_ns=50e6,
    )
    return Program(ddp=(ddp,))


class LargeBuckets(Rule):
    """
    ## What it means
    Gradients travel in one or two huge buckets. A bucket is sent when its last gradient is there, so the
    reduction begins when the backward pass ends, and nothing of it is hidden behind computation.

    ## What to do
    Leave `bucket_cap_mb` at its default of 25.

    ## When it is wrong
    A single parameter that holds most of the model is one bucket whatever the setting. On CPUs that have
    nothing to spare, sending and computing take turns, and little is won.
    """

    needs = ("program.ddp",)
    actions = ("ddp-bucket-size",)
    explains = ("exposed-communication",)
    fires_on = (
        profile(program=buckets(10**9, (400_000_000,))),
        profile(program=buckets(10**9, (300_000_000, 1_000_000), comm_ms=8)),
    )
    silent_on = (
        profile(program=buckets(BUCKET_BYTES, (25 * 2**20,) * 16)),
        profile(program=buckets(10**9, (4_000_000,))),
        profile(program=buckets(10**9, (400_000_000,), comm_ms=2)),
        profile(program=buckets(BUCKET_BYTES, (400_000_000, 1_000_000))),
        profile(program=buckets(10**9, (400_000_000,)), host=HostStats(runnable_share=0.4)),
    )

    def applies(self, profile: Profile) -> bool:
        return any(ddp.bucket_bytes for ddp in profile.program.ddp)

    def check(self, profile: Profile) -> Finding | None:
        ddp = profile.program.ddp[0]
        cap, sent = ddp.bucket_cap_bytes or BUCKET_BYTES, sum(ddp.bucket_bytes)
        usual = sent // BUCKET_BYTES
        if cap < MIN_TIMES_MORE * BUCKET_BYTES or usual < 2:
            return None
        if (profile.host.runnable_share or 0.0) > MAX_RUNNABLE_SHARE:
            return None
        if max(ddp.bucket_bytes) < MIN_LARGEST * sent:
            return None
        # Of the rank that waits least: it waits for the reduction alone.
        timed = [rank for rank in profile.program.ddp if rank.exposed_ns is not None]
        least = min(timed, key=lambda rank: rank.comm_ns or 0.0, default=None)
        if least is None or least.comm_ns is None or least.overlap_ns is None or not least.compute_ns:
            return None
        if least.overlap_ns > MAX_OVERLAP * least.comm_ns:
            return None
        hideable_ns = min(least.comm_ns * (1 - 1 / usual), HIDDEN * least.compute_ns) - least.overlap_ns
        waiting = reduces_in(profile)
        there_ns = profile.spent_ns(waiting)
        lost_ns = min(hideable_ns * ddp.synced_passes, 0.8 * there_ns)
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"{format_share(max(ddp.bucket_bytes) / sent)} of the gradients are in one bucket.",
            lost_ns={waiting: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, there_ns),
            assumption="all buckets but the last are sent while the rest is computed",
            evidence=(
                f"bucket_cap_mb allows {format_bytes(cap)}, the default {format_bytes(BUCKET_BYTES)};"
                f" {format_bytes(sent)} are in {len(ddp.bucket_bytes)} buckets.",
                f"By DDP's timers the reduction takes {format_ms(least.comm_ns)}, of which"
                f" {format_ms(least.overlap_ns)} are hidden.",
            ),
            fix="Leave bucket_cap_mb at its default.",
            code=made_without(ddp, "bucket_cap_mb"),
            file=ddp.file,
            line=ddp.line,
            actions=self.actions,
        )
