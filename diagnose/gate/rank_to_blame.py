"""Which rank of a job became slower: the others only wait for it, and their phases say no more."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile

MIN_PART = 0.2
"""Part of the loss by which a rank's own work must have grown more than the first rank's: what all ranks
lost alike, or nearly so, is told from the first."""


def rank_to_blame(before: Sequence[Profile], after: Sequence[Profile]) -> int | None:
    """Returns the rank whose own work grew most; `None` where the first rank's did, or nearly as much.

    Args:
        before: The first version's runs, in pairs with the second's.
        after: The second version's.
    """
    pairs = list(zip(before, after, strict=False))
    sides = [[own_times(profile) for profile in side] for side in zip(*pairs, strict=True)]
    common = set.intersection(*(set(times) for side in sides for times in side)) if pairs else set()
    if len(common) < 2:
        return None
    grown = {
        rank: statistics.median(now[rank] - then[rank] for then, now in zip(*sides, strict=True))
        for rank in common
    }
    first, worst = min(common), max(sorted(common), key=grown.__getitem__)
    loss = statistics.median(now.step_time_ns - then.step_time_ns for then, now in pairs)
    return worst if loss > 0 and grown[worst] - grown[first] >= MIN_PART * loss else None


def own_times(profile: Profile) -> Mapping[int, float]:
    """Returns what a step of each rank takes beside its waits for the others, in nanoseconds."""
    return {
        each.rank: sum(
            time_ns for phase, time_ns in each.phase_time_ns.items() if phase is not Phase.COMMUNICATION
        )
        for each in profile.ranks
    }
