"""Finds the rank that comes last to what the ranks meet for, by the waits measured in each step."""

from __future__ import annotations

from dataclasses import dataclass

from diagnose.analysis.lateness import beyond_others_ns
from diagnose.core.parallel import Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile

MIN_AGREEMENT = 0.4
"""Part of a rank's lateness that the others must be seen to wait: else it is busy beside them."""

MIN_LATE_SHARE = 0.75
"""Part of the steps in which a steady rank is the slowest: on a busy machine ranks take turns, and what one
of them lost in a few long steps makes its mean the longest."""

MIN_LEAD_SHARE = 0.9
"""Or part of ten stretches of the run in which it is the slowest most often: of two ranks that are alike,
chance lets one be that in 2 runs of 100, and it then costs hardly more than the other one does."""

GRADIENTS, TOGETHER = "has its gradients last", "is the last to come to what the ranks do together"

MUCH_MORE = 1.25
"""So many times what the ranks wait for a rank's gradients they must wait for it in all that they do
together: else it is the same wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A rank that comes last to nearly every meeting, by the waits that were measured in each step.

    Attributes:
        rank: Its number.
        held_ns: How long it holds the others up, per step.
        excess_ns: What it takes longer for than the others do at the median, by phase; never a wait.
        waits: What of it is won if the rank is as fast as the others, as a part of the first rank's own
            phases: less, where ranks that are alike would wait for each other, too.
        last_share: Part of the steps in which it comes last.
        where: What it comes last to, in words.
    """

    rank: int
    held_ns: float
    excess_ns: dict[Phase, float]
    waits: dict[Phase, float]
    last_share: float = 1.0
    where: str = GRADIENTS

    @property
    def won_ns(self) -> float:
        """All of `waits`."""
        return sum(self.waits.values())

    @property
    def phase(self) -> Phase | None:
        """In which it is slower, above all; `None` where it is slower in nothing."""
        return max(self.excess_ns, key=lambda phase: self.excess_ns[phase], default=None)


def last_to_come(meetings: Meetings) -> int | None:
    """Returns the rank that comes last in most steps; `None` where no rank does."""
    rank = max(meetings.last_share, key=lambda rank: meetings.last_share[rank], default=None)
    if rank is None:
        return None
    is_steady = meetings.last_share[rank] >= MIN_LATE_SHARE
    return rank if is_steady or meetings.lead_share.get(rank, 0.0) >= MIN_LEAD_SHARE else None


def held_alone_ns(meetings: Meetings, rank: int) -> float:
    """Returns nanoseconds per step that a rank holds the others up, beyond what they hold up each other:
    one that is seldom last is so by chance."""
    return meetings.held_ns[rank] - sum(ns for each, ns in meetings.held_ns.items() if each != rank)


def won_share(meetings: Meetings | None, rank: int, waited_ns: float) -> float:
    """Returns the part of what the others wait for a rank that is won if it is as fast as they are: ranks
    that are alike wait for each other, too.

    Args:
        meetings: Where they meet; `None` is not known.
        rank: The rank.
        waited_ns: What they wait for it, per step.
    """
    alone_ns = 0.0 if meetings is None or rank not in meetings.held_ns else held_alone_ns(meetings, rank)
    if meetings is None or alone_ns <= 0 or waited_ns <= 0:
        return 1.0
    left_ns = max(0.0, meetings.held_ns[rank] - meetings.chance_ns)
    by_chance_ns = max(0.0, alone_ns - left_ns)
    return 1 - by_chance_ns / max(alone_ns, waited_ns)


def where_held_up(profile: Profile, rank: int) -> Meetings | None:
    """Returns the meetings at which a rank holds the others up for longer; `None` where none were seen."""
    known = [each for each in (profile.program.meetings, profile.program.gatherings) if each is not None]
    return max(known, key=lambda each: each.held_ns.get(rank, 0.0), default=None)


def held_up_ns(profile: Profile, rank: int) -> float:
    """Returns nanoseconds per step for which a rank holds the others up, beyond chance; 0 where that is not
    known."""
    meetings = where_held_up(profile, rank)
    return 0.0 if meetings is None else meetings.held_ns.get(rank, 0.0) - meetings.chance_ns


def excess_of(profile: Profile, rank: int) -> dict[Phase, float]:
    """Returns what a rank takes longer for than the others do at the median, in nanoseconds per step by
    phase; never a wait for them."""
    place = profile.ranks.index(profile.rank(rank))
    return {phase: ns for phase, ns in beyond_others_ns(profile.ranks, place).items() if ns > 0}


def holding(profile: Profile) -> Held | None:
    """Returns the rank that the others wait for in most steps; `None` where no rank is. Where a collective
    of the loop's own comes first, they wait there, and meet for their gradients together."""
    met, gathered = (
        None if meetings is None else _holding(profile, meetings, where)
        for meetings, where in (
            (profile.program.meetings, GRADIENTS),
            (profile.program.gatherings, TOGETHER),
        )
    )
    if met is None or gathered is None:
        return met or gathered
    return gathered if gathered.held_ns > MUCH_MORE * met.held_ns else met


def _holding(profile: Profile, meetings: Meetings, where: str) -> Held | None:
    rank = last_to_come(meetings)
    if rank is None:
        return None
    one = profile.rank(rank)
    excess_ns = excess_of(profile, rank)
    held_ns = held_alone_ns(meetings, rank)
    slower_ns = sum(excess_ns.values())
    if held_ns <= 0 or slower_ns < MIN_AGREEMENT * held_ns:
        return None
    if where is TOGETHER:
        held_ns = min(held_ns, slower_ns)  # one that unpickles for all spends more in what they do together
    waits = {Phase.COMMUNICATION: held_ns}
    if one is profile.ranks[0]:
        waits = {}
        for phase, ns in excess_ns.items():
            for part, own_ns in own_parts(one, phase, min(1.0, held_ns / slower_ns) * ns).items():
                waits[part] = waits.get(part, 0.0) + own_ns
    held_ns = sum(waits.values())
    won = won_share(meetings, rank, held_ns)
    if not won:
        return None
    return Held(
        rank=rank,
        held_ns=held_ns,
        excess_ns=excess_ns,
        waits={phase: won * ns for phase, ns in waits.items()},
        last_share=meetings.last_share[rank],
        where=where,
    )


def own_parts(one: RankProfile, phase: Phase, lost_ns: float) -> dict[Phase, float]:
    """Divides what a late first rank loses among the phases that it is late in."""
    beside = {
        Phase.DATA_WAIT: (Phase.OTHER, one.standing_ns, one.working_ns),
        Phase.OTHER: (Phase.DATA_WAIT, one.working_ns, one.standing_ns),
    }
    other, came_ns, left_ns = beside.get(phase, (phase, 0.0, 0.0))
    if not came_ns:
        return {phase: lost_ns}
    own_ns = max(0.0, one.phase_time_ns.get(phase, 0.0) - left_ns)  # all of it, and rounding
    part = lost_ns / (own_ns + came_ns)
    return {phase: part * own_ns, other: part * came_ns}
