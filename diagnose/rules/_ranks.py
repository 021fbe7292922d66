"""Finds the rank that the others wait for.

Gradients are reduced when every rank has them, so all steps take as long as the slowest rank's. What a rank
is slower in shows in its own phases; the others spend the difference waiting, in backward or in a
collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

from diagnose.analysis.lateness import WAITS, beyond_others_ns
from diagnose.core.parallel import Averaging, Ddp, Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.source.calls import with_arguments

MIN_TIMED = 5
"""Of fewer timed passes the quickest may still be a slow one."""

MIN_AGREEMENT = 0.4
"""Part of a rank's lateness that the others must be seen to wait: else it is busy beside them."""

MIN_LATE_SHARE = 0.75
"""Part of the steps in which a steady rank is the slowest: on a busy machine ranks take turns, and what one
of them lost in a few long steps makes its mean the longest."""

MAX_NAMED = 4
"""Ranks that a sentence names one by one."""

MIN_LEAD_SHARE = 0.9
"""Or part of ten stretches of the run in which it is the slowest most often: of two ranks that are alike,
chance lets one be that in 2 runs of 100, and it then costs hardly more than the other one does."""


ALIKE = 0.7
"""Ranks that are late by so much of what the latest is are late with it: all of them must be mended."""


DDP_PLAIN = "DistributedDataParallel(model)"


def made_without(ddp: Ddp, argument: str) -> str:
    """Returns the script's own call of `DistributedDataParallel` without an argument."""
    without: dict[str, None] = {argument: None}
    call = with_arguments(ddp.call, "", **without) if ddp.call else ""
    return call if call and not call.startswith("(") else DDP_PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A rank that the others wait for.

    Attributes:
        rank: Its number.
        ranks: All that are late like it, itself too.
        host: The machine that all of these are on, where there are others and more than one of them; else
            empty.
        phase: In which it is slower.
        late_ns: By how much, per step.
        waits: What is won on the first rank, by the phase it is part of there: less than `held_ns` where
            ranks that are alike would wait for each other, too.
        held_ns: How long it holds the others up, per step.
    """

    rank: int
    phase: Phase
    late_ns: float
    waits: dict[Phase, float]
    ranks: tuple[int, ...] = ()
    host: str = ""
    held_ns: float = 0.0

    @property
    def who(self) -> str:
        """All of them in words, to begin a sentence with."""
        ranks = self.ranks or (self.rank,)
        if len(ranks) == 1:
            return f"Rank {self.rank}"
        if ranks[-1] - ranks[0] == len(ranks) - 1 > 1:
            said = f"Ranks {ranks[0]} to {ranks[-1]}"
        elif len(ranks) <= MAX_NAMED:
            said = f"Ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        else:
            said = f"Ranks {', '.join(map(str, ranks[:MAX_NAMED]))} and {len(ranks) - MAX_NAMED} others"
        return f"{said}, all on {self.host}," if self.host else said


def latest(
    profile: Profile, phases: Collection[Phase], *, steadily: bool = False, in_bursts: bool = False
) -> Late | None:
    """Returns the rank that is slowest in one of these phases, if the others are seen to wait for it.

    Args:
        profile: The run.
        phases: Those that are looked at.
        steadily: Leave out a rank that is so in some steps only.
        in_bursts: It is so in few steps, and then by much: what the others hold it up in all other steps
            does not make up for that.
    """
    if len(profile.ranks) < 2:
        return None
    found: Late | None = None
    found_ns = 0.0
    looked_at = {*phases, *waits_in(profile)}
    others_ns = {phase: medians_of_others([r.own_ns(phase) for r in profile.ranks]) for phase in looked_at}
    later_ns = {
        phase: [r.own_ns(phase) - others_ns[phase][i] for i, r in enumerate(profile.ranks)]
        for phase in phases
    }
    working = working_longer(profile.ranks) if Phase.OTHER in phases else frozenset()

    def late_share(rank: RankProfile, phase: Phase) -> float:
        """Part of the steps in which it is the slowest in what was measured; 1 where that is not known."""
        timed = Phase.DATA_WAIT if phase is Phase.OTHER and rank.rank in working else phase
        return rank.late_share.get(timed, 1.0)

    is_spread = len({rank.host for rank in profile.ranks}) > 1
    # Most that the ranks of a machine can come to together: of a thousand, few are looked at more closely.
    most: defaultdict[tuple[str, Phase], float] = defaultdict(float)
    for rank, phase in product(profile.ranks, phases):
        most[rank.host, phase] += late_share(rank, phase)
    for index, one in enumerate(profile.ranks):
        waited = {wait: others_ns[wait][index] - one.own_ns(wait) for wait in waits_in(profile)}
        for phase in phases:
            late_ns = later_ns[phase][index]
            waited_ns = sum(max(0.0, ns) for ns in waited.values())
            if in_bursts and (held_ns := _held_up_ns(profile, one.rank)) > waited_ns:
                waited, waited_ns = {reduces_in(profile): held_ns}, held_ns
            if late_ns <= 0 or waited_ns < MIN_AGREEMENT * late_ns:
                continue
            lost_ns = min(late_ns, waited_ns)
            if found is not None and lost_ns <= found_ns:
                continue
            if steadily and most[one.host, phase] < MIN_LATE_SHARE:
                continue
            pairs = zip(profile.ranks, later_ns[phase], strict=True)
            alike = [r for r, ns in pairs if ns >= ALIKE * late_ns]
            is_host = is_spread and len(alike) > 1 and {r.host for r in alike} == {one.host}
            # Those of a slow machine take turns at being the slowest of all.
            steady = sum(late_share(r, phase) for r in (alike if is_host else (one,)))
            if steadily and steady < MIN_LATE_SHARE:
                continue
            first = profile.ranks[0]
            is_first = any(each is first for each in alike)
            parts = {wait: lost_ns * max(0.0, ns) / waited_ns for wait, ns in waited.items()}
            waits = own_parts(first, phase, min(lost_ns, later_ns[phase][0])) if is_first else parts
            # Of those that are alike no one holds the others up, and pauses come beside what varies.
            meetings = None if in_bursts or len(alike) > 1 else _where_held_up(profile, one.rank)
            won = won_share(meetings, one.rank, sum(waits.values()))
            if not won:
                continue
            found_ns = sum(waits.values())
            found = Late(
                rank=one.rank,
                ranks=tuple(sorted(r.rank for r in alike)),
                host=one.host if is_host else "",
                phase=phase,
                late_ns=late_ns,
                held_ns=found_ns,
                waits={wait: won * ns for wait, ns in waits.items() if ns},
            )
    return found


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


def waits_in(profile: Profile) -> tuple[Phase, ...]:
    """Returns the phases in which a rank waits for the others."""
    program = profile.program
    known = program.meetings is not None or program.gatherings is not None
    return (Phase.COMMUNICATION,) if known else WAITS


def reduces_in(profile: Profile) -> Phase:
    """Returns the phase that holds what a backward pass waits for gradients on their way."""
    return waits_in(profile)[0]


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


def steady_wait_ns(ddp: Sequence[Ddp], but: Collection[int] = ()) -> float | None:
    """Returns how long ranks wait for gradients in the quickest of the passes that DDP itself timed.

    A busy machine makes now this rank wait and now that one, and in some passes hardly any: what is there
    in every pass, on every rank, is not its doing. For a slow link, in every pass but one: a rank that
    loses its CPU in the middle of a pass finds all gradients there when it goes on.

    Args:
        ddp: All ranks.
        but: Ranks that are left out: those that the others wait for.

    Returns:
        `None` if too few passes were timed.
    """
    waits = [one.exposed_ns_by_pass for one in ddp if one.rank not in but]
    common = set(waits[0]).intersection(*waits[1:]) if waits else set()
    if len(common) < MIN_TIMED:
        return None
    least = sorted(min(wait[i] for wait in waits) for i in common)
    return least[0] if but else least[1]


def usual_wait_ns(profile: Profile) -> float | None:
    """Returns how long ranks wait for gradients in a usual pass: the rank that waits least, which was the
    last to come and waits for no other. `None` if too few passes were timed."""
    ddp, meetings = profile.program.ddp, profile.program.meetings
    if meetings is not None:
        return meetings.calm_ns / (ddp[0].synced_passes or 1.0)
    waits = [one.exposed_ns_by_pass for one in ddp]
    common = set(waits[0]).intersection(*waits[1:]) if waits else set()
    if len(common) < MIN_TIMED:
        return None
    return median(min(wait[i] for wait in waits) for i in common)


def by_hand(profile: Profile) -> Averaging | None:
    """Returns how a loop averages its gradients itself; `None` where another does, or nobody."""
    program = profile.program
    averaging = program.averaging
    if program.ddp or program.fsdp is not None or averaging is None or not averaging.is_of_gradients:
        return None
    return averaging


def averaging_by_hand_ns(profile: Profile) -> float | None:
    """Returns nanoseconds per step in which every rank averages its gradients by hand, once for each pass:
    what is added up besides is something else. `None` where it does and that is not known."""
    averaging = by_hand(profile)
    if averaging is None:
        return 0.0
    times = [rank.averaged_ns for rank in profile.ranks]
    known = [ns for ns in times if ns is not None]
    if len(known) < len(times):
        return None
    return min(known) * min(1.0, max(1.0, averaging.passes) / averaging.times)


def waits_ns(profile: Profile, rank: RankProfile) -> float | None:
    """Returns how long a rank's backward passes of a step go on when its own gradients are all there.

    `None` without DDP's timers, nor ours of each pass.
    """
    meetings = profile.program.meetings
    if meetings is not None:
        return meetings.wait_ns.get(rank.rank)
    timed = next((ddp for ddp in profile.program.ddp if ddp.rank == rank.rank), None)
    if timed is None or timed.compute_ns is None:
        return None
    return max(0.0, rank.own_ns(Phase.BACKWARD) - (timed.passes_per_step or 1.0) * timed.compute_ns)


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


def _where_held_up(profile: Profile, rank: int) -> Meetings | None:
    """Returns the meetings at which a rank holds the others up for longer; `None` where none were seen."""
    known = [each for each in (profile.program.meetings, profile.program.gatherings) if each is not None]
    return max(known, key=lambda each: each.held_ns.get(rank, 0.0), default=None)


def _held_up_ns(profile: Profile, rank: int) -> float:
    """Returns nanoseconds per step for which a rank holds the others up, beyond chance; 0 where that is not
    known."""
    meetings = _where_held_up(profile, rank)
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
