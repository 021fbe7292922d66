"""Finds the rank that the others wait for.

Gradients are reduced when every rank has them, so all steps take as long as the slowest rank's. What a rank
is slower in shows in its own phases; the others spend the difference waiting, in backward or in a
collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

from diagnose.analysis.lateness import medians_of_others, working_longer
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.rules._meetings import (
    MIN_AGREEMENT,
    MIN_LATE_SHARE,
    held_up_ns,
    own_parts,
    where_held_up,
    won_share,
)
from diagnose.rules._reductions import reduces_in, waits_in

MAX_NAMED = 4
"""Ranks that a sentence names one by one."""

ALIKE = 0.7
"""Ranks that are late by so much of what the latest is are late with it: all of them must be mended."""


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
    ranks: tuple[int, ...]
    host: str = ""
    held_ns: float = 0.0

    @property
    def won_ns(self) -> float:
        """All of `waits`."""
        return sum(self.waits.values())

    @property
    def who(self) -> str:
        """All of them in words, to begin a sentence with."""
        ranks = self.ranks
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
            if in_bursts and (held_ns := held_up_ns(profile, one.rank)) > waited_ns:
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
            meetings = None if in_bursts or len(alike) > 1 else where_held_up(profile, one.rank)
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
