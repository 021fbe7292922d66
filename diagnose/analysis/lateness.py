"""How long the ranks wait for each of them: of a whole run for the report, bin by bin for the dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from diagnose.core.parallel import Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import RankProfile

Array = npt.NDArray[np.float64]

WAITS = (Phase.BACKWARD, Phase.COMMUNICATION)
"""Where a rank waits for the others, when its waits for gradients were not measured in each step."""

STRAGGLER_DEVIATIONS = 4.0
"""The latest rank is a straggler where it is so many robust deviations later than the others are."""

STRAGGLER_STEP_SHARE = 0.02
"""And by this part of the step at least: less nobody would look for."""

UPPER_QUARTILE = 0.75
QUARTILE_TO_SIGMA = 1.4826
"""Nobody is less than not late, so what scatters is seen on one side: its upper quartile, in deviations."""


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
    late: list[float | None] = behind(np.array(waits)).tolist()
    return late


def behind(waits: Array) -> Array:
    """Returns by how much each rank waits less than the usual one, which is what that one waits for it.

    Args:
        waits: What each rank waits, the ranks along the first axis; NaN where that is not known. The usual
            one is the median rank, of an even number the one of the two in the middle that waits longer:
            of two ranks one is late, and the other waits for it.
    """
    known = np.isfinite(waits).sum(axis=0)
    ordered = np.sort(waits, axis=0)  # what is not known comes last
    middle = np.minimum(known // 2, len(waits) - 1)
    usual = np.take_along_axis(ordered, np.expand_dims(middle, 0), axis=0)
    late: Array = np.maximum(usual - waits, 0.0)
    return late


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """The rank that holds the others up.

    Attributes:
        rank: Its number.
        late_ns: How long they wait for it, per step.
        cause: What it takes longest for beyond the median of the others; `None` where it takes longer for
            nothing.
    """

    rank: int
    late_ns: float
    cause: Phase | None = None


def straggler(ranks: Sequence[RankProfile]) -> Straggler | None:
    """Returns the rank that is later than the others scatter; `None` where none is, or there is but one."""
    late = [rank.late_ns_per_step for rank in ranks]
    known = [ns for ns in late if ns is not None]
    if len(known) < len(late):
        return None
    place = latest(known, [sum(rank.phase_time_ns.values()) for rank in ranks])
    if place is None:
        return None
    excess = beyond_others_ns(ranks, place)
    cause = max(excess, key=lambda phase: excess[phase])
    return Straggler(
        rank=ranks[place].rank, late_ns=known[place], cause=cause if excess[cause] > 0 else None
    )


def beyond_others_ns(ranks: Sequence[RankProfile], place: int) -> dict[Phase, float]:
    """Returns what the rank at a place takes longer for than the others do at the median; never a wait for
    them. In nanoseconds per step, by phase."""
    others = [rank for index, rank in enumerate(ranks) if index != place]
    return {
        phase: ranks[place].own_ns(phase) - median(rank.own_ns(phase) for rank in others)
        for phase in Phase
        if phase is not Phase.COMMUNICATION
    }


def slower_in(ranks: Sequence[RankProfile], rank: int, phase: Phase) -> str:
    """Says in which phase one of the ranks is slower than the others, in words."""
    works = phase is Phase.OTHER and rank in working_longer(ranks)
    return "what the loop does to its batches" if works else phase.label


def working_longer(ranks: Sequence[RankProfile]) -> frozenset[int]:
    """Returns the numbers of those, of two ranks or more, that take longer than the others in `OTHER`, as
    `own_ns` has it, mostly since they work longer on batches that they have."""

    def longer_ns(times: list[float]) -> list[float]:
        return [ns - others_ns for ns, others_ns in zip(times, medians_of_others(times), strict=True)]

    own_ns = longer_ns([rank.own_ns(Phase.OTHER) for rank in ranks])
    working_ns = longer_ns([rank.working_ns for rank in ranks])
    return frozenset(
        rank.rank
        for rank, own, working in zip(ranks, own_ns, working_ns, strict=True)
        if 2 * working > own > 0
    )


def medians_of_others(values: Sequence[float]) -> list[float]:
    """Returns, for each of two values or more, the median of all but it, in one sort."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ordered = [values[index] for index in order]
    upper = (len(values) - 1) // 2
    lower = (len(values) - 2) // 2
    medians = [0.0] * len(values)
    for place, index in enumerate(order):  # what stands behind it moves up by one
        medians[index] = (ordered[lower + (lower >= place)] + ordered[upper + (upper >= place)]) / 2
    return medians


def latest(late: Sequence[float], step: Sequence[float]) -> int | None:
    """Returns the place of the rank that is later than the others scatter; `None` where none is.

    Args:
        late: How late each rank is.
        step: How long its steps take, in the same unit.
    """
    if len(late) < 2:
        return None
    place = int(np.argmax(late))
    others = np.delete(np.asarray(late), place)
    spread = QUARTILE_TO_SIGMA * float(np.quantile(others, UPPER_QUARTILE, method="higher"))
    is_late = late[place] > max(STRAGGLER_DEVIATIONS * spread, STRAGGLER_STEP_SHARE * step[place])
    return place if is_late else None
