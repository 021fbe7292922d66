"""Parameters are gathered twice per step although they would fit"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Fsdp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Memory, Program
from diagnose.core.settings import Settings
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._examples import GIB, profile
from diagnose.rules._rank_examples import meeting
from diagnose.rules.base import Rule

FITS = 0.85
"""Part of the memory that the gathered parameters and all else may take."""

MIN_SHARE = 0.03
"""Of the step: what gathering costs differs by as much between one step and the next."""

LOW = 0.6
"""What is not gathered anew is not awaited; but some of the wait was for a rank that is late."""


def sharded(
    gather_ms: float, rss: int = 4, ranks: int = 2, reshards: bool = True, late_ms: float = 0
) -> Profile:
    """Ranks of a machine that gather twice for so long, and take so many GiB each of its 64; the first
    waits so long for the other besides."""
    fsdp = Fsdp(
        world_size=ranks,
        reshards=reshards,
        gather_ns=2 * gather_ms * 1e6,
        regather_ns=gather_ms * 1e6,
        unsharded_bytes=3 * GIB,
    )
    waits_ms = 2 * gather_ms + late_ms
    program = Program(
        fsdp=fsdp,
        memory=Memory(rss_bytes=rss * GIB, total_bytes=64 * GIB),
        gatherings=meeting(waits_ms, 2 * gather_ms, last=1, held_ms=late_ms),
    )
    return profile(communication_ms=waits_ms, program=program, settings=Settings(local_processes=ranks))


class Oversharded(Rule):
    """
    ## What it means
    Fully sharded training gathers each layer's parameters before its forward pass, gives them up, and
    gathers them again for the backward pass. The step waits for that, and the memory saved is not needed.

    ## What to do
    Keep the parameters after the forward pass: `fully_shard(layer, reshard_after_forward=False)`.

    ## When it is wrong
    Longer sequences are still to come. It is measured of `fully_shard` on CPUs alone: on GPUs the host only
    launches, and the rule abstains.
    """

    needs = (
        "program.fsdp.regather_ns",
        "program.fsdp.unsharded_bytes",
        "program.memory.rss_bytes",
        "program.memory.total_bytes",
    )
    fires_on = (sharded(30), sharded(8, rss=20))
    silent_on = (
        sharded(30, rss=30),
        sharded(30, ranks=8),
        sharded(30, reshards=False),
        sharded(2),
        sharded(2, late_ms=60),
    )

    def applies(self, profile: Profile) -> bool:
        return profile.program.fsdp is not None and bool(profile.program.fsdp.reshards)

    def check(self, profile: Profile) -> Finding | None:
        fsdp, memory, meetings = profile.program.fsdp, profile.program.memory, profile.program.gatherings
        assert fsdp is not None and fsdp.regather_ns is not None
        held, params, total = memory.rss_bytes, fsdp.unsharded_bytes, memory.total_bytes
        assert held is not None and params is not None and total is not None
        ranks = profile.settings.local_processes
        if ranks * (held + params) > FITS * total:
            return None
        there_ns = profile.phase_time_ns.get(Phase.COMMUNICATION, 0.0)
        waited_ns = min(fsdp.regather_ns, there_ns)
        if meetings is not None and there_ns:
            # A rank that is not waited for here is waited for where gradients are added up.
            waited_ns *= min(1.0, meetings.common_ns / there_ns)
        if waited_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The backward pass waits {format_ms(waited_ns)} for parameters that were there.",
            lost_ns={Phase.COMMUNICATION: waited_ns},
            low_ns=LOW * waited_ns,
            high_ns=waited_ns,
            assumption="what the forward pass has gathered is not gathered again",
            evidence=(
                f"Parameters are given up after the forward pass and gathered again, over"
                f" {fsdp.world_size} ranks.",
                f"Gathered, they are {format_bytes(params)} on each of {ranks} ranks here, which hold"
                f" {format_bytes(held)} each; the machine has {format_bytes(total)}.",
            ),
            fix="Keep the parameters between the forward and the backward pass.",
            code="fully_shard(layer, reshard_after_forward=False)",
        )
