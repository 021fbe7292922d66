"""How long the ranks wait for each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from diagnose.core.parallel import Meetings
from diagnose.core.phases import Phase

WAITS = (Phase.BACKWARD, Phase.COMMUNICATION)
"""Where a rank waits for the others, when its waits for gradients were not measured in each step."""


def lateness(phases: Sequence[Mapping[Phase, float]], meetings: Meetings | None) -> list[float | None]:
    """Returns, for each rank, nanoseconds per step that the others wait for it; `None` with one rank.

    Args:
        phases: Of each rank, in order of rank, nanoseconds per step of each phase.
        meetings: What they wait for gradients, where that was measured in each step. Else a rank is late by
            as much as it waits less than the usual one.
    """
    if len(phases) < 2:
        return [None for _ in phases]
    if meetings is not None and len(meetings.held_ns) == len(phases):
        return [meetings.held_ns[rank] for rank in sorted(meetings.held_ns)]
    waits = [sum(times.get(phase, 0.0) for phase in WAITS) for times in phases]
    usual = median(waits)
    return [max(0.0, usual - wait) for wait in waits]
