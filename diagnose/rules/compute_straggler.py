"""One rank computes longer, and all others wait for it"""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from statistics import median

from diagnose.analysis.lateness import slower_in
from diagnose.core.finding import Finding
from diagnose.core.history import History, LateRanks
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Calls, Program
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._meetings import holding, own_parts
from diagnose.rules._rank_examples import meeting, ranks_example
from diagnose.rules._rank_rule import RankRule
from diagnose.rules._ranks import Late, latest
from diagnose.rules._reductions import steady_wait_ns, waits_ns
from diagnose.rules.frequent_evaluation import generating_ns, teaching_ns

MIN_SHARE = 0.1
"""Ranks on a busy machine differ by less without anything being wrong."""

MIN_HELD_SHARE = 0.07
"""Less is enough where one rank was seen to come last steadily, step by step: a tenth more than the others
take is a smaller part of the longer step, and noise takes its share."""

MUCH_LONGER = 3.0
"""Times what the others take that a rank takes longer in code of the loop's own, if it does so in bursts:
a busy machine stretches what all ranks do, and does not make it three times as long."""

MIN_TIMED, MIN_LATE, MIN_RATIO = 6, 0.8, 1.2
"""A rank is slow in backward if, of at least so many passes that DDP timed, it was slower than each other
by this factor in this part: on a busy machine now one rank is late and now another."""

MIN_STEADY = 0.2
"""Part of the usual wait that the others must have in every pass that DDP timed: on a busy machine there is
a pass in which nobody waits."""

LOW, HIGH = 0.6, 1.2
"""Some of the wait would be there without the late rank."""

HOST = (Phase.COPY, Phase.FORWARD, Phase.OPTIMIZER, Phase.CHECKPOINT, Phase.OTHER)
"""Data wait and garbage collection have rules of their own: `input-straggler`, `gc-straggler`."""

OWN = (*HOST, Phase.BACKWARD, Phase.EVALUATION)
OF_FIRST = (Phase.CHECKPOINT, Phase.EVALUATION)
"""What the first rank saves and evaluates for all is for `checkpoint-stall` and `frequent-evaluation`, but
for what the training uses of it in every step."""

SLOW = {Phase.FORWARD: 60.0, Phase.BACKWARD: 40.0}
WAITING = {Phase.FORWARD: 20.0, Phase.BACKWARD: 80.0}
IN_BACKWARD = Program(
    ddp=tuple(
        Ddp(
            rank=rank,
            world_size=2,
            compute_ns=compute_ms * 1e6,
            comm_ns=comm_ms * 1e6,
            overlap_ns=overlap_ms * 1e6,
            compute_ns_by_pass=dict.fromkeys(range(4, 12), compute_ms * 1e6),
        )
        for rank, (compute_ms, comm_ms, overlap_ms) in enumerate(((30, 70, 25), (72, 20, 15)))
    )
)
BUSY = Program(
    ddp=tuple(
        Ddp(rank=r, exposed_ns_by_pass={**dict.fromkeys(range(4, 10), 40e6), 9: 0.1e6, 10: 0.1e6})
        for r in (0, 1)
    )
)
EVEN = Program(ddp=tuple(Ddp(rank=r, compute_ns=60e6, comm_ns=30e6, overlap_ns=25e6) for r in (0, 1)))

MEETS_SLOW = {Phase.FORWARD: 20.0, Phase.BACKWARD: 70.0, Phase.COMMUNICATION: 10.0}
MEETS_WAITING = {Phase.FORWARD: 20.0, Phase.BACKWARD: 30.0, Phase.COMMUNICATION: 50.0}
SAVING = {**MEETS_SLOW, Phase.BACKWARD: 30.0, Phase.CHECKPOINT: 40.0}
READS_AND_COMPUTES = {
    **MEETS_WAITING,
    Phase.DATA_WAIT: 25.0,
    Phase.BACKWARD: 45.0,
    Phase.COMMUNICATION: 10.0,
}
READS_OR_FILTERS = {**MEETS_SLOW, Phase.DATA_WAIT: 40.0, Phase.BACKWARD: 30.0}
FILTERS_ALONE = {Phase.DATA_WAIT: 40.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 40.0}
TEACHES = {**MEETS_SLOW, Phase.EVALUATION: 40.0, Phase.BACKWARD: 30.0}
FIRST_IN_BACKWARD = Program(meetings=meeting(10, 50, last=0, held_ms=40))
TEACHER_OF_FIRST = replace(FIRST_IN_BACKWARD, calls=Calls(num_steps=5, untrained=1.0))
TRAINED_OF_FIRST = replace(FIRST_IN_BACKWARD, calls=Calls(num_steps=5, untrained=0.0, free=0.0))
TEACHES_EACH_STEP = Series(median_ns={phase: ms * 1e6 for phase, ms in TEACHES.items()})
TEACHES_NOW_AND_THEN = Series(median_ns={**TEACHES_EACH_STEP.median_ns, Phase.EVALUATION: 0.0})
IN_BURSTS = {Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0, Phase.COMMUNICATION: 10.0, Phase.OTHER: 20.0}
HARDLY_ANY = {Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0, Phase.COMMUNICATION: 28.0, Phase.OTHER: 2.0}
ALSO_MUCH = {Phase.FORWARD: 20.0, Phase.BACKWARD: 46.0, Phase.COMMUNICATION: 26.0, Phase.OTHER: 8.0}
NOW_AND_THEN = Program(meetings=meeting(28, 10, last=1, held_ms=18, share=0.55))
NOT_LATE = (0.0, 0.0, 0.0, 0.0, 0.0)
ONCE = History(
    late=LateRanks(ranks=(0, 1), first=0, width=4, late_ns=(NOT_LATE, (2e6, 1e6, 90e6, 3e6, 2e6)))
)
EACH_TENTH = History(late=LateRanks(ranks=(0, 1), first=0, width=10, late_ns=(NOT_LATE, (20e6,) * 5)))
OF_FIRST_NOW_AND_THEN = Program(meetings=meeting(10, 28, last=0, held_ms=18, share=0.55))
IN_ALL = Program(gatherings=meeting(50, 10, last=1, held_ms=40))
IN_ALL_ALIKE = Program(gatherings=meeting(50, 10, last=1, held_ms=40, share=0.6))
NOT_IN_DDP = Program(meetings=meeting(10, 10, last=1, held_ms=0, share=0.5), gatherings=IN_ALL.gatherings)
LAST_IN_BACKWARD = Program(meetings=meeting(50, 10, last=1, held_ms=40))
MOSTLY_ALIKE = Program(meetings=meeting(50, 10, last=1, held_ms=40, share=0.6))
ON_A_BUSY_MACHINE = Program(meetings=meeting(50, 10, last=1, held_ms=40, share=0.6, leads=0.9))

_turns = ranks_example(WAITING, SLOW)
TAKING_TURNS = replace(
    _turns, ranks=tuple(replace(rank, late_share={Phase.FORWARD: 0.5}) for rank in _turns.ranks)
)


class ComputeStraggler(RankRule):
    """
    ## What it means
    One rank takes longer for its forward, its backward or its Python code, also for what its loop computes
    of a batch that it has been given. The others have their gradients and wait for its.

    ## What to do
    The phase says where to look: a rank with longer sequences, its own garbage collection, a shared or
    slower device, logging on rank 0.

    ## When it is wrong
    Ranks with different work on purpose, such as the stages of a pipeline. A rank that is late in some
    steps only is named where it runs code of its loop that the others do not, and never the first.
    """

    needs = ("ranks_comparable",)
    explains = ("python-overhead",)
    fires_on = (
        ranks_example(WAITING, SLOW),
        ranks_example(SLOW, WAITING),
        ranks_example(WAITING, WAITING, program=IN_BACKWARD),
        ranks_example(MEETS_WAITING, MEETS_SLOW, program=LAST_IN_BACKWARD),
        ranks_example(MEETS_WAITING, MEETS_SLOW, program=ON_A_BUSY_MACHINE),
        ranks_example(MEETS_WAITING, READS_AND_COMPUTES, program=LAST_IN_BACKWARD),
        ranks_example(MEETS_WAITING, TEACHES, program=LAST_IN_BACKWARD),
        ranks_example(TEACHES, MEETS_WAITING, program=TEACHER_OF_FIRST, series=TEACHES_EACH_STEP),
        ranks_example(MEETS_WAITING, MEETS_SLOW, program=IN_ALL),
        ranks_example(MEETS_WAITING, MEETS_SLOW, program=NOT_IN_DDP),
        ranks_example(HARDLY_ANY, IN_BURSTS, program=NOW_AND_THEN),
        ranks_example(HARDLY_ANY, IN_BURSTS, program=NOW_AND_THEN, history=EACH_TENTH),
        ranks_example(READS_OR_FILTERS, MEETS_WAITING, program=FIRST_IN_BACKWARD, working_ms=39.0),
        ranks_example(FILTERS_ALONE, WAITING, working_ms=39.0),
    )
    silent_on = (
        ranks_example(HARDLY_ANY, IN_BURSTS, program=NOW_AND_THEN, history=ONCE),
        ranks_example(SLOW, SLOW),
        ranks_example(WAITING, WAITING, program=EVEN),
        ranks_example(WAITING, SLOW, program=BUSY),
        TAKING_TURNS,
        ranks_example(MEETS_WAITING, MEETS_SLOW, program=MOSTLY_ALIKE),
        ranks_example(ALSO_MUCH, IN_BURSTS, program=NOW_AND_THEN),
        ranks_example(IN_BURSTS, HARDLY_ANY, program=OF_FIRST_NOW_AND_THEN),
        ranks_example(MEETS_WAITING, MEETS_WAITING, program=LAST_IN_BACKWARD),
        ranks_example(MEETS_WAITING, READS_OR_FILTERS, program=LAST_IN_BACKWARD),
        ranks_example(READS_OR_FILTERS, MEETS_WAITING, program=FIRST_IN_BACKWARD),
        ranks_example(MEETS_WAITING, MEETS_SLOW, program=IN_ALL_ALIKE),
        ranks_example(MEETS_WAITING, MEETS_WAITING, program=IN_ALL),
        ranks_example(SAVING, MEETS_WAITING, program=FIRST_IN_BACKWARD),
        ranks_example(TEACHES, MEETS_WAITING, program=TEACHER_OF_FIRST, series=TEACHES_NOW_AND_THEN),
        ranks_example(TEACHES, MEETS_WAITING, program=TRAINED_OF_FIRST, series=TEACHES_EACH_STEP),
        ranks_example(TEACHES, TEACHES, program=TEACHER_OF_FIRST, series=TEACHES_EACH_STEP),
    )

    def check(self, profile: Profile) -> Finding | None:
        if profile.program.meetings is not None or profile.program.gatherings is not None:
            return self._by_meetings(profile)
        found = (latest(profile, HOST, steadily=True), _late_in_backward(profile))
        late = max(filter(None, found), key=lambda late: late.won_ns, default=None)
        if late is None or late.won_ns < MIN_SHARE * profile.step_time_ns:
            return None
        # The first rank that is late as it saves is for `checkpoint-stall`.
        if late.phase is Phase.CHECKPOINT and late.rank == profile.ranks[0].rank:
            return None
        waits = _all_of_it(profile, late)
        lost_ns = sum(waits.values())
        steady_ns = steady_wait_ns(profile.program.ddp, but=late.ranks)
        if steady_ns is not None and steady_ns < MIN_STEADY * lost_ns:
            return None
        where = slower_in(profile.ranks, late.rank, late.phase)
        slower = "are slower" if len(late.ranks) > 1 else "is slower"
        return Finding(
            rule=self.name,
            summary=f"{late.who} {slower} in {where}, and the others wait.",
            lost_ns=waits,
            low_ns=LOW * lost_ns,
            high_ns=HIGH * lost_ns,
            assumption="every step takes as long as its slowest rank",
            evidence=(
                f"Rank {late.rank} takes {format_ms(late.late_ns)} longer in {where}.",
                f"The others wait {format_ms(lost_ns)} of each step for its gradients.",
            ),
            fix=f"Find what slows {late.host}: its clocks, its other jobs, what its ranks do more of."
            if late.host
            else f"Find what rank {late.rank} does more of, or slower, in {where}.",
            ranks=late.ranks,
        )

    def _by_meetings(self, profile: Profile) -> Finding | None:
        """Where each step tells who came last, nothing has to be guessed from means. What a rank is late by
        for another reason, as its input, is left to the rule that knows it."""
        held = holding(profile)
        if held is None:
            return self._in_bursts(profile)
        is_first = held.rank == profile.ranks[0].rank
        longer_ns = {p: _left_ns(profile, p, ns) if is_first else ns for p, ns in held.excess_ns.items()}
        own_ns = {p: ns for p, ns in longer_ns.items() if p in OWN and ns > 0}
        if not own_ns:
            return None
        phase = max(own_ns, key=lambda phase: own_ns[phase])
        whole_ns, slower_ns = sum(held.excess_ns.values()), sum(own_ns.values())
        if slower_ns / whole_ns * held.held_ns < MIN_HELD_SHARE * profile.step_time_ns:
            return None
        part_ns = held.won_ns / whole_ns  # of each nanosecond that it takes longer
        lost_ns = part_ns * slower_ns
        one, where = profile.rank(held.rank), slower_in(profile.ranks, held.rank, phase)
        return Finding(
            rule=self.name,
            summary=f"Rank {held.rank} is slower in {where}, and the others wait for it.",
            lost_ns=_of_first(one, {slow: part_ns * ns for slow, ns in own_ns.items()})
            if is_first
            else {Phase.COMMUNICATION: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=HIGH * lost_ns,
            assumption="every step takes as long as its slowest rank",
            evidence=(
                f"Rank {held.rank} {held.where} in {format_share(held.last_share)} of the steps, and holds"
                f" the others up for {format_ms(held.held_ns)} of each.",
                "It takes longer than they do for "
                + ", ".join(
                    f"{slower_in(profile.ranks, held.rank, slow)} ({format_ms(ns)})"
                    for slow, ns in _most(held.excess_ns)
                )
                + ".",
            ),
            fix=f"Find what rank {held.rank} does more of, or slower, in {where}.",
            ranks=(held.rank,),
        )

    def _in_bursts(self, profile: Profile) -> Finding | None:
        """A rank that now and then runs code that the others have next to none of: a busy machine stretches
        what there is. What the first rank does so for all has rules of its own."""
        late = latest(profile, (Phase.OTHER,), in_bursts=True)
        if late is None or len(late.ranks) > 1 or late.rank == profile.ranks[0].rank:
            return None
        others_ns = median(each.own_ns(Phase.OTHER) for each in profile.ranks if each.rank != late.rank)
        if MUCH_LONGER * others_ns > late.late_ns or late.held_ns < MIN_HELD_SHARE * profile.step_time_ns:
            return None
        if _is_once(profile, late.rank):
            return None
        where = slower_in(profile.ranks, late.rank, late.phase)
        return Finding(
            rule=self.name,
            summary=f"Rank {late.rank} is now and then slower in {where}, and the others wait for it.",
            lost_ns=late.waits,
            low_ns=LOW * late.held_ns,
            high_ns=HIGH * late.held_ns,
            assumption="every step takes as long as its slowest rank",
            evidence=(
                f"Rank {late.rank} takes {format_ms(late.late_ns)} longer in {where}, in the mean of all"
                f" steps, and the others {format_ms(others_ns)}.",
                f"The others wait {format_ms(late.held_ns)} of the mean step for it.",
            ),
            fix=f"Find what rank {late.rank} alone does every so many steps.",
            ranks=late.ranks,
        )


def _is_once(profile: Profile, rank: int) -> bool:
    """Whether a rank holds the others up in one stretch of the run for most of what it does so in all."""
    late = profile.history.late if profile.history is not None else None
    if late is None or rank not in late.ranks:
        return False
    held_ns = [ns for ns in late.late_ns[late.ranks.index(rank)] if not isnan(ns)]
    return sum(held_ns) < 2.0 * max(held_ns, default=0.0)


def _left_ns(profile: Profile, phase: Phase, longer_ns: float) -> float:
    """Returns what of the first rank's lateness in a phase no other rule names: not what it evaluates, be
    it in every step, but what a teacher or one that writes texts computes there for the training itself."""
    if phase is Phase.EVALUATION:
        others_ns = median(rank.phase_time_ns.get(phase, 0.0) for rank in profile.ranks[1:])
        known_ns = max(teaching_ns(profile), generating_ns(profile))
        # Not scaled by the mean step: that has in it what this rank alone evaluates and saves now and then.
        usual_ns = profile.series.median_ns.get(phase, known_ns)
        return max(0.0, min(longer_ns, min(known_ns, usual_ns) - others_ns))
    return 0.0 if phase in OF_FIRST else longer_ns


def _of_first(one: RankProfile, lost: dict[Phase, float]) -> dict[Phase, float]:
    """Divides what a late first rank loses among the phases that it is a part of in its ledger."""
    parts: dict[Phase, float] = {}
    for slow, ns in lost.items():
        for phase, part_ns in own_parts(one, slow, ns).items():
            parts[phase] = parts.get(phase, 0.0) + part_ns
    return parts


def _most(excess_ns: dict[Phase, float]) -> list[tuple[Phase, float]]:
    """The phases in which a rank loses most, and no crumbs."""
    whole = sum(excess_ns.values())
    return [(p, ns) for p, ns in sorted(excess_ns.items(), key=lambda item: -item[1]) if ns > 0.1 * whole]


def _all_of_it(profile: Profile, late: Late) -> dict[Phase, float]:
    """Returns what is won on the first rank if this one were as fast as the others, in every phase.

    Whoever is late in the forward is late in the backward pass, too. All of it is what the others wait when
    their own gradients are there, and no more than that; what the late rank itself waits for gradients is
    nobody's lateness.
    """
    one = profile.rank(late.rank)
    others = [rank for rank in profile.ranks if rank is not one]
    waited = [ns for rank in others if (ns := waits_ns(profile, rank)) is not None]
    ddp = {each.rank: each for each in profile.program.ddp}
    computed = {
        rank: (each.passes_per_step or 1.0) * (each.compute_ns or 0.0) for rank, each in ddp.items()
    }
    if not waited or late.rank not in computed:
        return late.waits
    by_phase = {phase: one.own_ns(phase) - median(rank.own_ns(phase) for rank in others) for phase in HOST}
    by_phase[Phase.BACKWARD] = computed[late.rank] - median(computed.get(r.rank, 0.0) for r in others)
    by_phase = {phase: ns for phase, ns in by_phase.items() if ns > 0}
    lost_ns = min(sum(by_phase.values()), median(waited) - (waits_ns(profile, one) or 0.0))
    if lost_ns <= 0:
        return late.waits
    if profile.ranks[0].rank not in late.ranks:
        return {Phase.BACKWARD: lost_ns}
    part = lost_ns / sum(by_phase.values())
    return _of_first(one, {phase: part * ns for phase, ns in by_phase.items()})


def _late_in_backward(profile: Profile) -> Late | None:
    """By DDP's own timers: when each rank's gradients were there, and how long it then waited."""
    timed = [ddp for ddp in profile.program.ddp if ddp.compute_ns and ddp.exposed_ns is not None]
    if len(timed) < 2:
        return None
    last = max(timed, key=lambda ddp: ddp.compute_ns or 0.0)
    others = [ddp for ddp in timed if ddp is not last]
    common = set(last.compute_ns_by_pass).intersection(*(ddp.compute_ns_by_pass for ddp in others))
    late = [
        all(last.compute_ns_by_pass[i] > MIN_RATIO * ddp.compute_ns_by_pass[i] for ddp in others)
        for i in common
    ]
    if len(common) < MIN_TIMED or sum(late) < MIN_LATE * len(common):
        return None
    late_ns = min((last.compute_ns or 0.0) - (ddp.compute_ns or 0.0) for ddp in others)
    waited_ns = min((ddp.exposed_ns or 0.0) - (last.exposed_ns or 0.0) for ddp in others)
    passes = last.passes_per_step or 1.0
    lost_ns = passes * min(late_ns, waited_ns)
    if lost_ns <= 0:
        return None
    backward_ns = profile.spent_ns(Phase.BACKWARD)
    return Late(
        rank=last.rank,
        ranks=(last.rank,),
        phase=Phase.BACKWARD,
        late_ns=passes * late_ns,
        waits={Phase.BACKWARD: min(lost_ns, backward_ns)},
    )
