"""One rank has to wait for a CPU, and all others for that rank"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

from diagnose.core.finding import Finding
from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, RankProfile
from diagnose.core.program import Program
from diagnose.core.units import format_ms, format_share
from diagnose.rules._ranks import holding, meeting, ranks_example
from diagnose.rules.base import Rule

MIN_SHARE = 0.08
"""Of the step, in which the others wait."""

MIN_DELAY_SHARE = 0.1
"""Part of its time that the rank waits for a CPU beyond what the others do: ranks that share a machine all
wait a little."""

MIN_EXPLAINED = 0.3
"""Part of the lateness that this waiting must make up: else something else makes the rank late."""

LOW, HIGH = 0.5, 1.2
"""Some of the wait would be there without the late rank."""

ALIKE = {Phase.FORWARD: 20.0, Phase.BACKWARD: 40.0, Phase.COMMUNICATION: 40.0}
SLOW = {Phase.FORWARD: 32.0, Phase.BACKWARD: 64.0, Phase.COMMUNICATION: 4.0}


def delayed(*shares: float | None) -> Profile:
    """Two ranks of which the second comes last, and that wait so long for a CPU."""
    met = Program(meetings=meeting(40, 4, last=1, held_ms=36))
    ranks = ranks_example(ALIKE, SLOW, program=met)
    stats = (HostStats(on_cpu_share=0.5, runnable_share=share) for share in shares)
    return replace(
        ranks,
        ranks=tuple(replace(rank, stats=each) for rank, each in zip(ranks.ranks, stats, strict=True)),
    )


class ContendedRank(Rule):
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

    needs = ("program.meetings",)
    explains = ("compute-straggler", "input-straggler", "noisy-neighbour")
    fires_on = (delayed(0.02, 0.4), delayed(0.1, 0.35))
    silent_on = (delayed(0.02, 0.05), delayed(0.4, 0.42), delayed(None, None), delayed(0.4, 0.02))

    def applies(self, profile: Profile) -> bool:
        """See `Rule.applies`."""
        return len(profile.ranks) > 1

    def check(self, profile: Profile) -> Finding | None:
        """See `Rule.check`."""
        held = holding(profile)
        if held is None or held.held_ns < MIN_SHARE * profile.step_time_ns:
            return None
        one = next(rank for rank in profile.ranks if rank.rank == held.rank)
        others = [ns for rank in profile.ranks if rank is not one and (ns := _delay(rank)) is not None]
        own = _delay(one)
        if own is None or not others:
            return None
        usual = median(others)
        step_ns = sum(one.phase_time_ns.values())
        if own - usual < MIN_DELAY_SHARE or (own - usual) * step_ns < MIN_EXPLAINED * held.held_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"Rank {held.rank} waits for a CPU, and the others for rank {held.rank}.",
            lost_ns=held.waits,
            low_ns=LOW * held.held_ns,
            high_ns=HIGH * held.held_ns,
            assumption="with CPUs of its own the rank is as fast as the others",
            evidence=(
                f"Rank {held.rank} is ready to run and has no CPU for {format_share(own)} of the time; the"
                f" others for {format_share(usual)}.",
                f"It has its gradients last, and holds the others up for {format_ms(held.held_ns)} of each"
                " step.",
            ),
            fix=f"Find what else runs on the CPUs of rank {held.rank}"
            + (f", on {one.host}." if one.host else "."),
            ranks=(held.rank,),
        )


def _delay(rank: RankProfile) -> float | None:
    """Part of the time that a rank's training thread waits for a CPU, or for its quota to begin anew."""
    return rank.stats.runnable_share
