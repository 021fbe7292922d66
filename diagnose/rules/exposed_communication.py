"""The backward pass ends by waiting for gradients on their way"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

MIN_SHARE = 0.08
"""The last bucket can never be hidden; less than this is its share."""

MAX_RUNNABLE_SHARE = 0.15
"""A training thread that waits longer than this for a CPU says nothing of the link: the threads that carry
the gradients wait for one, too."""

LOW, EXPECTED, HIGH = 0.3, 0.8, 1.0
"""What can be hidden or left out: a part by larger buckets or fewer bits, nearly all by accumulation."""


def reducing(*exposed_ms: float) -> Program:
    return Program(
        ddp=tuple(
            Ddp(
                rank=rank,
                world_size=len(exposed_ms),
                backend="gloo",
                param_bytes=400_000_000,
                bucket_bytes=(25_000_000,) * 16,
                comm_ns=(ms + 10) * 1e6,
                overlap_ns=10e6,
                compute_ns=40e6,
            )
            for rank, ms in enumerate(exposed_ms)
        )
    )


class ExposedCommunication(Rule):
    """
    ## What it means
    The gradients are all computed, and every rank waits until they have been averaged. Torch sends a bucket
    while the next one is computed, but the link is slower than the computation.

    ## What to do
    Send less often (accumulate under `no_sync`), or fewer bits (the bf16 communication hook), or over a
    faster link.

    ## When it is wrong
    A rank that is late looks the same to the others. Only what every rank waits is counted here.
    """

    needs = ("program.ddp",)
    actions = ("ddp-bf16-hook", "no-sync", "ddp-bucket-size")
    fires_on = (profile(program=reducing(20, 22)), profile(program=reducing(9, 30)))
    silent_on = (profile(program=reducing(1, 40)), profile(program=reducing(2, 2)))

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return len(profile.program.ddp) > 1

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        ddp = profile.program.ddp
        exposed = [rank.exposed_ns for rank in ddp if rank.exposed_ns is not None]
        if len(exposed) < len(ddp) or (profile.host.runnable_share or 0.0) > MAX_RUNNABLE_SHARE:
            return None
        synced = (ddp[0].passes_per_step or 1.0) * (
            1.0 if ddp[0].synced_share is None else ddp[0].synced_share
        )
        backward_ns = profile.phase_time_ns.get(Phase.BACKWARD, 0.0)
        waited_ns = min(min(exposed) * synced, backward_ns)
        if waited_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Every rank waits {format_ms(waited_ns)} of each step for gradients.",
            lost_ns={Phase.BACKWARD: EXPECTED * waited_ns},
            low_ns=LOW * waited_ns,
            high_ns=HIGH * waited_ns,
            assumption="most of it can be hidden or left out; no link is free",
            evidence=(
                "By DDP's timers the reduction goes on after the last gradient for"
                f" {', '.join(format_ms(ns) for ns in exposed)} on the ranks.",
                f"{format_bytes(ddp[0].param_bytes or 0)} in {len(ddp[0].bucket_bytes)} buckets,"
                f" over {ddp[0].backend}.",
            ),
            fix="Reduce less often or in fewer bits.",
            code="model.register_comm_hook(None, default_hooks.bf16_compress_hook)",
            actions=self.actions,
        )
