"""Gradients are averaged over the ranks in every micro-batch"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Ddp, Meetings
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_ms
from diagnose.rules._examples import profile
from diagnose.rules._ranks import reduces_in
from diagnose.rules.base import Rule

MIN_PASSES = 1.9
"""Backward passes per step: with one, there is nothing to leave out."""

HIDDEN_COST = 0.3
"""Part of a hidden reduction that still costs: it takes memory bandwidth, and on CPUs the cores."""

LOW, HIGH = 0.6, 1.5


def accumulating(passes: float, synced: float, waited_ns: float | None = None) -> Program:
    ranks = (
        Ddp(
            rank=rank,
            world_size=2,
            comm_ns=8e6,
            overlap_ns=3e6,
            compute_ns=10e6,
            synced_share=synced,
            passes_per_step=passes,
        )
        for rank in (0, 1)
    )
    if waited_ns is None:
        return Program(ddp=tuple(ranks))
    met = Meetings(num_steps=100, wait_ns={0: waited_ns, 1: 2 * waited_ns}, common_ns=waited_ns / 2)
    return Program(ddp=tuple(ranks), meetings=met)


class MissingNoSync(Rule):
    """
    ## What it means
    Several micro-batches make a step, and DDP averages the gradients after each of them. Only the last
    average counts.

    ## What to do
    Run all but the last micro-batch, forward and backward, under `model.no_sync()`.

    ## When it is wrong
    Several losses or models whose passes belong to different optimizers.
    """

    needs = ("program.ddp",)
    actions = ("no-sync",)
    explains = ("exposed-communication",)
    fires_on = (
        profile(program=accumulating(4, 1.0)),
        profile(program=accumulating(2, 1.0)),
        profile(communication_ms=30, program=accumulating(4, 1.0, waited_ns=24e6)),
    )
    silent_on = (profile(program=accumulating(4, 0.25)), profile(program=accumulating(1, 1.0)))

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return bool(profile.program.ddp) and len(profile.program.optimizers) <= 1

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        ddp = profile.program.ddp
        passes, synced = ddp[0].passes_per_step or 1.0, ddp[0].synced_share
        if synced is None or passes < MIN_PASSES or synced * passes < MIN_PASSES:
            return None
        exposed = min((rank.exposed_ns for rank in ddp if rank.exposed_ns is not None), default=None)
        if exposed is None:
            return None
        hidden = min(rank.overlap_ns or 0.0 for rank in ddp)
        needless = synced * passes - 1
        waiting = reduces_in(profile)
        there_ns = profile.phase_time_ns.get(waiting, 0.0)
        meetings = profile.program.meetings
        if meetings is not None and meetings.wait_ns:
            # Every wait was measured; what the rank that waits least does is no straggler's doing.
            exposed = min(meetings.wait_ns.values()) / (needless + 1)
        lost_ns = min(needless * (exposed + HIDDEN_COST * hidden), 0.9 * there_ns)
        if lost_ns < 0.02 * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Gradients are averaged {synced * passes:.0f} times in each step; once is enough.",
            lost_ns={waiting: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, there_ns),
            assumption="each average holds a pass up for as long as the others do",
            evidence=(
                f"{passes:.0f} backward passes per step, all of those looked at with a reduction.",
                f"One reduction holds the pass up for {format_ms(exposed)}.",
            ),
            fix="Run all but the last micro-batch under model.no_sync().",
            code="with model.no_sync(): criterion(model(x), y).backward()",
            actions=self.actions,
        )
