"""The backward pass ends by waiting for gradients on their way"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp, Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._examples import profile
from diagnose.rules._rank_examples import meeting
from diagnose.rules._reductions import steady_wait_ns
from diagnose.rules.base import Rule

MIN_SHARE = 0.08
"""The last bucket can never be hidden; less than this is its share."""

LOW, EXPECTED = 0.3, 0.9
"""What can be hidden or left out of it: a part by fewer bits, nearly all by accumulation."""

LATENCY_NS = 300_000.0
"""What the reduction of the last bucket takes between two processes of one idle machine."""


def reducing(*exposed_ms: float, calmest_ms: float | None = None) -> Program:
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
                exposed_ns_by_pass={
                    **dict.fromkeys(range(4, 9), ms * 1e6),
                    **dict.fromkeys((9, 10), (ms if calmest_ms is None else calmest_ms) * 1e6),
                },
            )
            for rank, ms in enumerate(exposed_ms)
        )
    )


def met(*waits_ms: float) -> Program:
    met = meeting(*waits_ms, last=0, held_ms=max(waits_ms) - min(waits_ms))
    return replace(reducing(*waits_ms), meetings=met)


class ExposedCommunication(Rule):
    """
    ## What it means
    The gradients are all computed, and every rank waits until they have been averaged. Torch sends a bucket
    while the next one is computed, but the link is slower than the computation.

    ## What to do
    Send less often (accumulate under `no_sync`), or fewer bits (the bf16 communication hook), or over a
    faster link.

    ## When it is wrong
    A rank that is late, or a machine that is busy with something else, looks the same to the others: only
    what the last rank to come waits, in all but the calmest quarter of the steps, is counted here. (On
    GPUs: what all ranks wait, in all passes that DDP timed but one.) A link that is slow at times is not
    seen.
    """

    is_limit = True
    needs = ("program.ddp",)
    actions = ("ddp-bf16-hook", "no-sync", "ddp-bucket-size", "ddp-int8-hook", "ddp-power-sgd-hook")
    fires_on = (
        profile(program=reducing(20, 22)),
        profile(program=reducing(9, 30)),
        profile(communication_ms=30, program=met(20, 30)),
    )
    silent_on = (
        profile(program=reducing(1, 40)),
        profile(program=reducing(2, 2)),
        profile(program=reducing(20, 22, calmest_ms=0.1)),
        profile(communication_ms=30, program=met(1, 30)),
    )

    def applies(self, profile: Profile) -> bool:
        return len(profile.program.ddp) > 1

    def check(self, profile: Profile) -> Finding | None:
        ddp = profile.program.ddp
        meetings = profile.program.meetings
        if meetings is not None:
            return self._by_meetings(profile, meetings)
        steady_ns = steady_wait_ns(ddp)
        if steady_ns is None:
            return None
        typical_ns = min(rank.exposed_ns or 0.0 for rank in ddp)
        backward_ns = profile.spent_ns(Phase.BACKWARD)
        waited_ns = min(max(0.0, steady_ns - LATENCY_NS) * ddp[0].synced_passes, backward_ns)
        if waited_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return self._found(
            profile,
            {Phase.BACKWARD: EXPECTED * waited_ns},
            waited_ns,
            min(max(waited_ns, EXPECTED * typical_ns), backward_ns),
            "By DDP's timers the reduction goes on after the last gradient, on every rank, for"
            f" {format_ms(steady_ns)} in the quickest pass and {format_ms(typical_ns)} in a usual one.",
        )

    def _by_meetings(self, profile: Profile, meetings: Meetings) -> Finding | None:
        """Where each step tells what the last rank to come still waits."""
        ddp = profile.program.ddp[0]
        there_ns = profile.spent_ns(Phase.COMMUNICATION)
        waited_ns = min(max(0.0, meetings.calm_ns - LATENCY_NS * ddp.synced_passes), there_ns)
        if waited_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return self._found(
            profile,
            {Phase.COMMUNICATION: EXPECTED * waited_ns},
            waited_ns,
            max(waited_ns, min(EXPECTED * meetings.common_ns, there_ns)),
            "When the last rank has its gradients, it still waits for"
            f" {format_ms(meetings.common_ns)} on average, and for {format_ms(meetings.calm_ns)} or more"
            " in three of four steps.",
        )

    def _found(
        self, profile: Profile, lost_ns: dict[Phase, float], waited_ns: float, high_ns: float, seen: str
    ) -> Finding:
        """Returns the finding that every rank waits so long, as was `seen`."""
        ddp = profile.program.ddp[0]
        return Finding(
            rule=self.name,
            summary=f"Every rank waits {format_ms(waited_ns)} or more of each step for gradients.",
            lost_ns=lost_ns,
            low_ns=LOW * waited_ns,
            high_ns=high_ns,
            assumption="most of it can be hidden or left out; no link is free",
            evidence=(
                seen,
                f"{format_bytes(ddp.param_bytes or 0)} in {len(ddp.bucket_bytes)} buckets,"
                f" over {ddp.backend}.",
            ),
            fix="Reduce less often or in fewer bits.",
            code=_hooked(profile),
            actions=self.actions,
        )


def _hooked(profile: Profile) -> str:
    """Returns the call that halves the bits; torch refuses it on CPUs, where `--tune` has a hook for it."""
    on_cpu = profile.run.device == "cpu"
    return "" if on_cpu else "model.register_comm_hook(None, default_hooks.bf16_compress_hook)"
