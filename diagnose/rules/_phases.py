"""Which phases a time lies in, and how it is divided among them."""

from __future__ import annotations

from collections.abc import Iterable

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile

STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""What every step computes."""

LOOP = (*STEP, Phase.OTHER)
"""Phases in which the training thread computes, launches kernels or waits for them."""


def shared(
    profile: Profile, lost_ns: float, phases: Iterable[Phase] = LOOP, *, most: float = 1.0
) -> dict[Phase, float]:
    """Divides a time of the step among phases, in proportion to theirs; those without time are left out.

    Args:
        profile: The run.
        lost_ns: Nanoseconds per step.
        phases: Those that it lies in.
        most: Part of each phase, 0 to 1, that it takes at most.
    """
    times = {phase: ns for phase in phases if (ns := profile.spent_ns(phase)) > 0}
    whole_ns = sum(times.values())
    part = min(most, lost_ns / whole_ns) if whole_ns else 0.0
    return {phase: part * ns for phase, ns in times.items()}
