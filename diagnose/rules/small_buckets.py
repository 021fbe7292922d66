"""DDP sends gradients in too many small buckets"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.parallel import Ddp, Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_duration
from diagnose.rules._examples import profile
from diagnose.rules._reductions import BUCKET_BYTES, made_without, reduces_in, usual_wait_ns, waits_ns
from diagnose.rules.base import WORTH_SHARE, Rule

MIN_TIMES_MORE = 3
"""Fewer buckets more than with the default hardly cost anything."""

FIRST_BUCKET_BYTES = 2**20
"""What DDP puts into the first bucket by itself."""

PER_BUCKET_NS = {"nccl": 30_000.0, "gloo": 200_000.0}
"""What a reduction costs however small it is: launch, latency, and its own copy in and out."""

LOW, HIGH = 0.3, 2.0
"""Latency differs that much between one machine and a network; some of it is hidden."""

LOW_TIMED, HIGH_TIMED = 0.6, 1.3
"""Where DDP's timers tell, passes differ by about this."""

USUAL_DELAY = 0.05
"""Part of the time that the training thread waits for a CPU where two ranks that share two of them send one
bucket."""

FEW_FOREIGN = 0.25
"""CPUs that others may use, and still what the training thread waits for is its own job's."""

MOST = 0.9
"""Of a phase that is not only this."""


def buckets(num: int, each_bytes: int, cap_bytes: int, calm_ns: float | None = None) -> Program:
    ddp = Ddp(
        world_size=2,
        backend="gloo",
        bucket_cap_bytes=cap_bytes,
        bucket_bytes=(each_bytes,) * num,
        param_bytes=num * each_bytes,
    )
    if calm_ns is None:
        return Program(ddp=(ddp,))
    met = Meetings(num_steps=100, wait_ns={0: 2 * calm_ns}, common_ns=calm_ns, calm_ns=calm_ns)
    return Program(ddp=(ddp,), meetings=met)


CROWDED = HostStats(runnable_share=0.2, process_cpus=1.0, busy_cpus=1.1)
BESIDE_OTHERS = HostStats(runnable_share=0.2, process_cpus=1.0, busy_cpus=1.9)


class SmallBuckets(Rule):
    """
    ## What it means
    Gradients travel in many buckets of a few kilobytes, and each reduction has its own fixed cost. One
    follows the other, so what ranks wait after the last gradient is theirs, but for the few that would do.
    On CPUs the threads that reduce also take the backward pass's CPU while it still computes.

    ## What to do
    Leave `bucket_cap_mb` at its default of 25, or raise it.

    ## When it is wrong
    Very few parameters before the last layers, where a small first bucket starts the reduction early.
    """

    needs = ("program.ddp",)
    actions = ("ddp-bucket-size",)
    explains = ("exposed-communication",)
    fires_on = (
        profile(step_ms=50, program=buckets(60, 100_000, 100_000)),
        profile(step_ms=20, program=buckets(16, 1_000_000, 1_000_000)),
        profile(step_ms=100, host=CROWDED, program=buckets(40, 16_000, 10_000, calm_ns=1e6)),
        profile(step_ms=15, host=CROWDED, program=buckets(4, 150_000, 50_000, calm_ns=1e6)),
    )
    silent_on = (
        profile(step_ms=50, program=buckets(16, 25 * 2**20, BUCKET_BYTES)),
        profile(step_ms=5000, program=buckets(16, 1_000_000, 1_000_000)),
        profile(step_ms=15, host=CROWDED, program=buckets(4, 500_000, 500_000, calm_ns=1e6)),
        profile(step_ms=100, host=BESIDE_OTHERS, program=buckets(40, 16_000, 10_000, calm_ns=1e6)),
    )

    def applies(self, profile: Profile) -> bool:
        return any(len(rank.bucket_bytes) > MIN_TIMES_MORE for rank in profile.program.ddp)

    def check(self, profile: Profile) -> Finding | None:
        ddp = profile.program.ddp[0]
        num, cap = len(ddp.bucket_bytes), ddp.bucket_cap_bytes or BUCKET_BYTES
        total_bytes = sum(ddp.bucket_bytes)
        usual = 2 + total_bytes // BUCKET_BYTES if total_bytes > FIRST_BUCKET_BYTES else 1
        if cap >= BUCKET_BYTES or num < MIN_TIMES_MORE * usual:
            return None
        waiting = reduces_in(profile)
        there_ns = profile.spent_ns(waiting)
        passes = ddp.synced_passes
        timed_ns = usual_wait_ns(profile)
        crowded_ns = 0.0
        if timed_ns is None:
            per_bucket = PER_BUCKET_NS.get(ddp.backend, PER_BUCKET_NS["gloo"])
            lost_ns = (num - usual) * per_bucket * passes
            assumption = (
                f"{format_duration(per_bucket)} per reduction over {ddp.backend}, besides its bytes"
            )
        else:
            meetings = profile.program.meetings
            waited = [ns for rank in profile.ranks if (ns := waits_ns(profile, rank)) is not None]
            usual_ns = timed_ns * passes
            waited_ns = min([meetings.common_ns if meetings else usual_ns, *waited])
            lost_ns = waited_ns * (1 - usual / num)
            crowded_ns = crowded_out_ns(profile) * (1 - usual / num)
            assumption = "so few bytes take no time themselves; each reduction takes the same"
        low, high = (LOW, HIGH) if timed_ns is None else (LOW_TIMED, HIGH_TIMED)
        lost = {waiting: min(lost_ns, MOST * there_ns)}
        if crowded_ns:
            backward_ns = profile.spent_ns(Phase.BACKWARD)
            there_ns += 0.0 if waiting is Phase.BACKWARD else backward_ns
            lost[Phase.BACKWARD] = min(lost.get(Phase.BACKWARD, 0.0) + crowded_ns, MOST * backward_ns)
        lost_ns = sum(lost.values())
        if lost_ns < WORTH_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Gradients travel in {num} buckets; {usual} would do.",
            lost_ns={phase: ns for phase, ns in lost.items() if ns},
            low_ns=low * lost_ns,
            high_ns=min(high * lost_ns, there_ns),
            assumption=assumption,
            evidence=(
                f"bucket_cap_mb allows {format_bytes(cap)}, the default {format_bytes(BUCKET_BYTES)}.",
                f"{format_bytes(sum(ddp.bucket_bytes))} are divided into {num} buckets.",
                *(
                    (f"The last rank to be done waits {format_duration(timed_ns)} for the rest.",)
                    if timed_ns is not None
                    else ()
                ),
                *(
                    (f"Meanwhile the backward pass waits {format_duration(crowded_ns)} for a CPU.",)
                    if crowded_ns
                    else ()
                ),
            ),
            fix="Leave bucket_cap_mb at its default.",
            code=made_without(ddp, "bucket_cap_mb"),
            file=ddp.file,
            line=ddp.line,
            actions=self.actions,
        )


def crowded_out_ns(profile: Profile) -> float:
    """Returns how long a step's backward pass waits for CPUs that the job's own threads have.

    Measured with two ranks on two CPUs and 40 buckets for one: steps 39 ms longer, of which 16 ms are the
    common wait and 21 ms this.
    """
    delayed, foreign = profile.host.runnable_share, profile.foreign_cpus
    if profile.program.ddp[0].on_cuda or delayed is None or foreign is None or foreign > FEW_FOREIGN:
        return 0.0
    return max(0.0, delayed - USUAL_DELAY) * profile.step_time_ns
