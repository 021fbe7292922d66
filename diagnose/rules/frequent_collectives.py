"""The script calls collectives of its own in every step"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from diagnose.core.finding import Finding
from diagnose.core.parallel import Averaging, Ddp, Fsdp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Program
from diagnose.core.series import Series
from diagnose.core.units import format_ms, format_share
from diagnose.rules._lines import at
from diagnose.rules._meetings import excess_of, held_alone_ns, last_to_come
from diagnose.rules._rank_examples import meeting, ranks_example
from diagnose.rules._rank_rule import RankRule
from diagnose.rules._reductions import averaging_by_hand_ns

MIN_SHARE = 0.03
"""One small reduction per step takes less."""

MIN_OFTEN = 0.08
"""Part of the steps: what is called in fewer is an evaluation's, or an epoch's."""

MOST = 0.5
"""A line of whose time so much is for the loss is not the one to look at."""

LOW = 0.5
"""One in many steps would remain."""

TURNS = {Phase.COMMUNICATION: 20.0, Phase.BACKWARD: 80.0}
"""Now one rank is late to a single reduction and now the other."""

SHARDED = Program(fsdp=Fsdp(world_size=2, gather_ns=12e6, scatter_ns=7e6))
LAUNCHED = Program(fsdp=Fsdp(world_size=2, gather_ns=1e6, scatter_ns=1e6))
NOT_KNOWN = Program(fsdp=Fsdp(world_size=2))
UNPICKLES = Program(meetings=meeting(1, 17, last=0, held_ms=16), collective_ns=19e6)
WAITS_FOR_IT = replace(UNPICKLES, collective_ns=2e6)
COMPUTES = {Phase.COMMUNICATION: 3.0, Phase.BACKWARD: 97.0}
WAITS_IN_GATHER = {Phase.COMMUNICATION: 12.0, Phase.BACKWARD: 88.0}
LATE_TO_GATHER = {Phase.COMMUNICATION: 5.0, Phase.BACKWARD: 95.0}
GATHERED = at("dist.all_gather(others, z)", 0.19, phase=Phase.COMMUNICATION)
NOW_AND_THEN = Series(median_ns={Phase.COMMUNICATION: 0.0, Phase.BACKWARD: 80e6})
IN_EACH_FOURTH = Program(collective_ns=20e6, collective_share=0.25)
ONCE_AN_EPOCH = Program(collective_ns=20e6, collective_share=0.02)


def averaging(times: float, averaged_ms: float, passes: float = 1.0, *, inside: bool = False) -> Profile:
    """Two ranks that spend 20 ms in collectives, and so much of it in adding up that many times what the
    optimizer updates."""
    program = Program(averaging=Averaging(passes=passes, times=times, inside=inside))
    job = ranks_example(TURNS, TURNS, program=program)
    return replace(job, ranks=tuple(replace(each, averaged_ns=averaged_ms * 1e6) for each in job.ranks))


def gathering(
    *times_ms: dict[Phase, float], gathering_ms: tuple[float, float], collective_ns: float | None = None
) -> Profile:
    """Two ranks that gather for the loss in so much of the time that they spend in collectives."""
    line = replace(GATHERED, for_loss=gathering_ms[0] / 100)
    job = ranks_example(*times_ms, program=Program(collective_ns=collective_ns), where=(line,))
    ranks = zip(job.ranks, gathering_ms, strict=True)
    return replace(job, ranks=tuple(replace(each, gathering_ns=ms * 1e6) for each, ms in ranks))


class FrequentCollectives(RankRule):
    """
    ## What it means
    Besides the gradients, the loop averages a metric, gathers results or waits at a barrier in every step.
    Each such call stops the loop until all ranks have come.

    ## What to do
    Sum on each rank and reduce once every hundred steps, or at the end of the epoch. Take barriers out.

    ## When it is wrong
    A loss that needs what `all_reduce` changes in place: what it gets otherwise of the other ranks' batches
    is not counted. A loop that averages its gradients itself is known by how much it adds up, or gathers,
    between backward and the optimizer: where it compresses them, that is taken for its own. Nothing is said
    of `fully_shard` on GPUs, nor of ranks there that send to each other, whose model or optimizer calls
    collectives, or whose DDP sends buffers: a step's own communication cannot be told from the script's.
    """

    explains = ("logging-io", "slow-metrics")
    fires_on = (
        ranks_example(TURNS, {Phase.COMMUNICATION: 18.0, Phase.BACKWARD: 82.0}),
        ranks_example(LATE_TO_GATHER, {Phase.COMMUNICATION: 40.0, Phase.BACKWARD: 60.0}),
        averaging(1.0, 12.0),
        averaging(0.1, 19.0),
        averaging(2.0, 19.0),
        gathering(TURNS, TURNS, gathering_ms=(5, 5)),
        gathering(WAITS_IN_GATHER, LATE_TO_GATHER, gathering_ms=(8, 1)),
        gathering(WAITS_IN_GATHER, LATE_TO_GATHER, gathering_ms=(8, 1), collective_ns=5e6),
        ranks_example(TURNS, TURNS, program=UNPICKLES),
        ranks_example(TURNS, TURNS, program=IN_EACH_FOURTH, series=NOW_AND_THEN),
    )
    silent_on = (
        ranks_example(
            {Phase.COMMUNICATION: 1.0, Phase.BACKWARD: 99.0},
            {Phase.COMMUNICATION: 40.0, Phase.BACKWARD: 60.0},
        ),
        ranks_example({Phase.BACKWARD: 100.0}, {Phase.BACKWARD: 100.0}),
        ranks_example(TURNS, TURNS, program=Program(collective_ns=1e6)),
        averaging(1.0, 19.5),
        averaging(4.0, 19.5, passes=4.0),
        averaging(2.0, 19.5, inside=True),
        gathering(TURNS, TURNS, gathering_ms=(18, 18)),
        gathering(TURNS, TURNS, gathering_ms=(18, 18), collective_ns=10e6),
        gathering(WAITS_IN_GATHER, LATE_TO_GATHER, gathering_ms=(11, 4), collective_ns=5e6),
        ranks_example(COMPUTES, TURNS, program=WAITS_FOR_IT),
        ranks_example(TURNS, TURNS, program=ONCE_AN_EPOCH, series=NOW_AND_THEN),
        ranks_example(TURNS, TURNS, program=SHARDED),
        ranks_example(TURNS, TURNS, program=LAUNCHED, device="cuda"),
        ranks_example(TURNS, TURNS, program=NOT_KNOWN),
        ranks_example(TURNS, TURNS, exchanged_ms=19.0),
        ranks_example(TURNS, TURNS, exchanged_ms=None, device="cuda"),
        ranks_example(TURNS, TURNS, program=Program(ddp=(Ddp(broadcasts_buffers=True),)), device="cuda"),
    )

    def check(self, profile: Profile) -> Finding | None:
        program, of_gradients_ns = profile.program, 0.0
        if program.fsdp is not None:
            gather_ns, scatter_ns = program.fsdp.gather_ns, program.fsdp.scatter_ns
            if profile.run.device != "cpu" or gather_ns is None or scatter_ns is None:
                return None
            of_gradients_ns += gather_ns + scatter_ns
        if profile.run.device != "cpu" and any(ddp.broadcasts_buffers for ddp in program.ddp):
            return None  # what launching that takes is not told from the script's
        averaging_ns = averaging_by_hand_ns(profile)
        if averaging_ns is None:
            return None
        lost_ns = _own_ns(profile, of_gradients_ns + averaging_ns)
        usual_ns = profile.series.median_ns.get(Phase.COMMUNICATION)
        often = program.collective_share
        if usual_ns is not None and (often is None or often < MIN_OFTEN):
            lost_ns = min(lost_ns, 2 * usual_ns)  # once an epoch is not each step
        alone_ns, lost_ns = _alone_ns(profile), max(0.0, lost_ns)
        if program.collective_ns is None or any(rank.exchanged_ns for rank in profile.ranks):
            lost_ns += alone_ns
        else:
            alone_ns = min(alone_ns, lost_ns)  # what all lose has it already
        if lost_ns < MIN_SHARE * profile.step_time_ns:
            return None
        own = (each for each in profile.where if each.phase is Phase.COMMUNICATION)
        line = next((each for each in own if each.for_loss < MOST * each.share), None)
        return Finding(
            rule=self.name,
            summary=f"Collectives of the script's own take {format_share(lost_ns / profile.step_time_ns)}.",
            lost_ns={Phase.COMMUNICATION: lost_ns},
            low_ns=LOW * lost_ns,
            high_ns=max(lost_ns, profile.phase_time_ns[Phase.COMMUNICATION]),
            assumption="they can be left out or called once in many steps",
            evidence=(
                f"All ranks spend {format_ms(lost_ns - alone_ns)} of each step in collectives of Python's,"
                " or wait longer for gradients because of them.",
                "In each step the rank that waits least does not wait for another: this is what they cost.",
                *_of_one_rank(alone_ns),
            ),
            fix="Reduce metrics once in many steps.",
            file=line.file if line is not None and not line.file.startswith("<") else "",
            line=line.line if line is not None and not line.file.startswith("<") else 0,
        )


def _among_all_ns(rank: RankProfile) -> float:
    """Time in what all ranks take part in and the loop calls; none where that is not known."""
    if rank.exchanged_ns is None:
        return 0.0
    return rank.phase_time_ns.get(Phase.COMMUNICATION, 0.0) - rank.exchanged_ns


def _own_ns(profile: Profile, of_gradients_ns: float) -> float:
    """Returns what every rank spends in what all take part in, but in what is for gradients or the loss.

    Whoever comes late to a gather for the loss waits less in it than the others, so each rank's own counts.
    """
    among_all_ns = [_among_all_ns(rank) for rank in profile.ranks]
    own_ns = [ns - rank.gathering_ns for ns, rank in zip(among_all_ns, profile.ranks, strict=True)]
    lost_ns = min(own_ns) - of_gradients_ns
    if profile.program.collective_ns is None:
        return lost_ns
    # Of each step's last rank; which part of that is for the loss, the ranks tell by their means.
    told_apart_ns = min(rank.exchanged_ns or 0.0 for rank in profile.ranks)
    least_ns = profile.program.collective_ns - told_apart_ns - of_gradients_ns
    parts = [
        max(0.0, own - of_gradients_ns) / (ns - of_gradients_ns)
        for own, ns in zip(own_ns, among_all_ns, strict=True)
        if ns > of_gradients_ns
    ]
    return min(lost_ns, least_ns * max(parts, default=1.0))


def _alone_ns(profile: Profile) -> float:
    """Returns what one rank spends longer in these collectives than the others, who wait for its gradients
    meanwhile: it gets objects and unpickles them. What it computes longer is not counted."""
    meetings = profile.program.meetings
    if meetings is None:
        return 0.0
    rank = last_to_come(meetings)
    if rank is None:
        return 0.0
    own_ns = {
        each.rank: _among_all_ns(each) - meetings.wait_ns.get(each.rank, 0.0) for each in profile.ranks
    }
    longer_ns = own_ns.pop(rank) - median(own_ns.values())
    computes_ns = sum(excess_of(profile, rank).values())
    return max(0.0, min(longer_ns, held_alone_ns(meetings, rank) - computes_ns))


def _of_one_rank(alone_ns: float) -> tuple[str, ...]:
    """Says what one rank alone spends, if it does."""
    if not alone_ns:
        return ()
    return (f"For {format_ms(alone_ns)} more one rank alone unpickles what it got, and the others wait.",)
