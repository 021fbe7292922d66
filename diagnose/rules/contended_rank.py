"""One rank has to wait for a CPU, and all others for that rank"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Program
from diagnose.core.units import format_ms
from diagnose.rules._meetings import holding
from diagnose.rules._phases import STEP
from diagnose.rules._rank_examples import meeting, ranks_example
from diagnose.rules._rank_rule import RankRule

MIN_SHARE = 0.08
"""Of the step, in which the others wait."""

MIN_EXPLAINED = 0.5
"""Part of the lateness that waiting for CPUs must make up: else something else makes the rank late."""

MIN_STRETCH = 1.2
"""Every phase that computes must take so many times longer than on the others: what makes one of them
longer, such as more tokens, leaves the optimizer as it is."""

MAX_RATIO = 4.0
"""By so many times more may one phase be stretched than another: a phase that waits in part is less so.
What makes a single phase longer does so by far more than chance does the others."""

MIN_CROWDED = 1.0
"""Or else it waits for a CPU so many times as long as it has one: a phase that is shorter than a slice of
the scheduler's is often not interrupted at all, and the thread waits where it wakes up."""

MIN_PHASE = 0.02
"""Of the step: shorter phases are not looked at."""

LOW, HIGH = 0.5, 1.2
"""Some of the wait would be there without the late rank."""

ALIKE = {Phase.FORWARD: 18.0, Phase.BACKWARD: 36.0, Phase.OPTIMIZER: 6.0, Phase.COMMUNICATION: 40.0}
SLOW = {Phase.FORWARD: 28.0, Phase.BACKWARD: 58.0, Phase.OPTIMIZER: 10.0, Phase.COMMUNICATION: 4.0}
LONGER = {Phase.FORWARD: 30.0, Phase.BACKWARD: 60.0, Phase.OPTIMIZER: 6.0, Phase.COMMUNICATION: 4.0}


def delayed(*shares: float | None, late: dict[Phase, float] = SLOW) -> Profile:
    """Two ranks of which the second comes last, and that wait so long for a CPU."""
    met = Program(meetings=meeting(40, 4, last=1, held_ms=36))
    ranks = ranks_example(ALIKE, late, program=met)
    stats = (HostStats(on_cpu_share=0.5, runnable_share=share) for share in shares)
    return replace(
        ranks,
        ranks=tuple(replace(rank, stats=each) for rank, each in zip(ranks.ranks, stats, strict=True)),
    )


class ContendedRank(RankRule):
    """
    ## What it means
    Something else runs on the CPUs of one rank: its training thread is ready to run and has to wait for its
    turn, in every phase. The others wait for its gradients.

    ## What to do
    Find the other process on that machine, or on those cores: another job, a data loader's workers, a rank
    that is bound to the same cores. Give the rank cores of its own.

    ## When it is wrong
    All ranks waiting for CPUs alike are `thread-oversubscription` or `noisy-neighbour`.
    """

    needs = ("program.meetings", "ranks_comparable")
    explains = ("compute-straggler", "input-straggler", "noisy-neighbour")
    fires_on = (delayed(0.02, 0.4), delayed(0.1, 0.35), delayed(0.02, 0.6, late=LONGER))
    silent_on = (
        delayed(0.02, 0.4, late=LONGER),
        delayed(0.02, 0.1),
        delayed(0.4, 0.42),
        delayed(None, None),
        delayed(0.4, 0.02),
    )

    def check(self, profile: Profile) -> Finding | None:
        held = holding(profile)
        if held is None or held.held_ns < MIN_SHARE * profile.step_time_ns:
            return None
        one = profile.rank(held.rank)
        others = [each for rank in profile.ranks if rank is not one and (each := _delay(rank)) is not None]
        own = _delay(one)
        if own is None or not others:
            return None
        # Whoever computes more waits for a CPU more often, on a machine where all do.
        usual = median(others)
        delay_ns = (own - usual) * (one.stats.on_cpu_share or 0.0) * sum(one.phase_time_ns.values())
        is_crowded = own >= MIN_CROWDED and delay_ns >= held.held_ns
        if delay_ns < MIN_EXPLAINED * held.held_ns or not (is_crowded or _all_stretched(profile, one)):
            return None
        return Finding(
            rule=self.name,
            summary=f"Rank {held.rank} waits for a CPU, and the others for rank {held.rank}.",
            lost_ns=held.waits,
            low_ns=LOW * held.won_ns,
            high_ns=HIGH * held.won_ns,
            assumption="with CPUs of its own the rank is as fast as the others",
            evidence=(
                f"For each second that rank {held.rank} is on a CPU it waits {own:.1f} s for one; the"
                f" others wait {usual:.1f} s.",
                f"It has its gradients last, and holds the others up for {format_ms(held.held_ns)} of each"
                " step.",
            ),
            fix=f"Find what else runs on the CPUs of rank {held.rank}"
            + (f", on {one.host}." if one.host else "."),
            ranks=(held.rank,),
        )


def _all_stretched(profile: Profile, one: RankProfile) -> bool:
    """Whether a rank takes longer in all that it computes, and about as many times in each."""
    stretches = []
    for phase in STEP:
        usual_ns = median(rank.phase_time_ns.get(phase, 0.0) for rank in profile.ranks if rank is not one)
        if usual_ns > MIN_PHASE * profile.step_time_ns:
            stretches.append(one.phase_time_ns.get(phase, 0.0) / usual_ns)
    least, most = min(stretches, default=0.0), max(stretches, default=0.0)
    return least >= MIN_STRETCH and most - 1 <= MAX_RATIO * (least - 1)


def _delay(rank: RankProfile) -> float | None:
    """How long a rank's training thread waits for a CPU, as a multiple of its time on one."""
    waited, on_cpu = rank.stats.runnable_share, rank.stats.on_cpu_share
    return waited / on_cpu if waited is not None and on_cpu else None
