"""Parameters are gathered twice per step although they would fit"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Fsdp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_bytes, format_ms
from diagnose.rules._examples import GIB, profile
from diagnose.rules.base import Rule

FITS = 0.85
"""Part of the memory that the gathered parameters and all else may take."""

SAVED = 0.5
"""Of the gathering: the backward pass then finds what the forward gathered."""

MIN_SHARE = 0.03

LOW, HIGH = 0.6, 2.0
"""Gathering is hidden better in one pass than in the other; not sharding at all would save both."""

GATHERING = (Phase.FORWARD, Phase.BACKWARD)


def sharded(gather_ms: float, peak: int = 20, reshards: bool = True) -> Program:
    fsdp = Fsdp(
        world_size=8,
        reshards=reshards,
        gather_ns=gather_ms * 1e6,
        peak_bytes=peak * GIB,
        unsharded_bytes=14 * GIB,
        total_bytes=80 * GIB,
    )
    return Program(fsdp=fsdp)


class Oversharded(Rule):
    """
    ## What it means
    Fully sharded training gathers each layer's parameters before its forward pass, gives them up, and
    gathers them again for the backward pass. The step waits for that, and the memory saved is not needed.

    ## What to do
    Keep the parameters after the forward pass: `fully_shard(layer, reshard_after_forward=False)`, or
    `ShardingStrategy.SHARD_GRAD_OP` with the older class.

    ## When it is wrong
    Longer sequences are still to come. What the step waits for gathering is measured of `fully_shard` on
    CPUs alone: on GPUs the host only launches, and the rule abstains.
    """

    needs = (
        "program.fsdp.gather_ns",
        "program.fsdp.peak_bytes",
        "program.fsdp.unsharded_bytes",
        "program.fsdp.total_bytes",
    )
    fires_on = (profile(program=sharded(30)), profile(program=sharded(8, peak=50)))
    silent_on = (
        profile(program=sharded(30, peak=70)),
        profile(program=sharded(30, reshards=False)),
        profile(program=sharded(3)),
    )

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return profile.program.fsdp is not None and bool(profile.program.fsdp.reshards)

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        fsdp = profile.program.fsdp
        assert fsdp is not None and fsdp.gather_ns is not None
        peak, params, total = fsdp.peak_bytes, fsdp.unsharded_bytes, fsdp.total_bytes
        assert peak is not None and params is not None and total is not None
        if peak + params > FITS * total:
            return None
        seen = profile.phase_time_ns.get(Phase.COMMUNICATION, 0.0) >= fsdp.gather_ns
        gathering = (Phase.COMMUNICATION,) if seen else GATHERING
        times = {phase: profile.phase_time_ns.get(phase, 0.0) for phase in gathering}
        there_ns = sum(times.values())
        waited_ns = min(fsdp.gather_ns, there_ns)
        lost_ns = SAVED * waited_ns
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The step waits {format_ms(waited_ns)} for parameters to be gathered.",
            lost_ns={phase: lost_ns * ns / there_ns for phase, ns in times.items() if ns},
            low_ns=LOW * lost_ns,
            high_ns=HIGH * lost_ns,
            assumption="gathering once instead of twice takes half the time",
            evidence=(
                f"Parameters are given up after the forward pass and gathered again, over"
                f" {fsdp.world_size} ranks.",
                f"Gathered, they are {format_bytes(params)}; the peak is {format_bytes(peak)} of"
                f" {format_bytes(total)}.",
            ),
            fix="Keep the parameters between the forward and the backward pass.",
            code="fully_shard(layer, reshard_after_forward=False)",
        )
