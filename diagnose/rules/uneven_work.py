"""Ranks get batches of different size, and wait for the fullest"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.parallel import Imbalance, Meetings
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.program import Program
from diagnose.core.units import format_duration, format_ms, format_share
from diagnose.rules._meetings import holding
from diagnose.rules._phases import shared
from diagnose.rules._rank_examples import meeting, ranks_example
from diagnose.rules._rank_rule import RankRule

MIN_CORRELATION = 0.7
"""How well a rank's forward time must follow the size of its batch: else something else is slow."""

SEEN_CORRELATION = 0.35
"""Likewise, where the rank that always has the fullest batch is seen to come last: on a busy machine single
steps scatter far more than batches differ."""

MIN_SPREAD = 0.03
"""Part by which the fullest batch is above the mean; shuffled data of one length differ by nothing."""

PASSES = 3
"""A backward pass takes about two forward passes."""

MIN_SHARE = 0.04

LOW, HIGH = 0.6, 1.2
"""Batches are never quite even; what a backward pass takes for each token is not measured."""

COMPUTING = (Phase.FORWARD, Phase.BACKWARD)


def uneven(
    spread: float = 300.0,
    correlation: float = 0.95,
    forward_ns: float = 30e3,
    meetings: Meetings | None = None,
) -> Profile:
    imbalance = Imbalance(
        unit="tokens",
        spread=spread,
        mean=1000.0,
        forward_ns_per_unit=forward_ns,
        correlation=correlation,
        fullest={0: 0.4, 1: 0.6} if meetings is None else {0: 0.0, 1: 1.0},
    )
    few = many = {Phase.FORWARD: 30.0, Phase.BACKWARD: 70.0}
    if meetings is not None:
        few = {**few, Phase.COMMUNICATION: 33.0}
        many = {Phase.FORWARD: 39.0, Phase.BACKWARD: 91.0, Phase.COMMUNICATION: 3.0}
    return ranks_example(few, many, program=Program(imbalance=imbalance, meetings=meetings))


SEEN = meeting(33, 3, last=1, held_ms=30)


class UnevenWork(RankRule):
    """
    ## What it means
    In the same step one rank has a batch of many tokens or samples and another one of few. The gradients
    are averaged when the fullest is done; the others wait. Which rank that is may change at every step, so
    means over the run do not show it.

    ## What to do
    Give each rank batches of the same number of tokens: sort by length into buckets and deal them out in
    the same order on all ranks, or pack sequences.

    ## When it is wrong
    Ranks whose devices differ, and whose batches differ to match. How long sequences of vectors are,
    `(B, T, F)`, is not counted: where ranks differ in that alone, nothing is said but of a rank that always
    comes last.
    """

    needs = ("program.imbalance", "ranks_comparable")
    explains = ("compute-straggler", "exposed-communication")
    fires_on = (uneven(), uneven(spread=100.0), uneven(correlation=0.5, meetings=SEEN))
    silent_on = (
        uneven(spread=10.0),
        uneven(correlation=0.3),
        uneven(forward_ns=1e3),
        ranks_example(
            {Phase.FORWARD: 30.0, Phase.BACKWARD: 70.0}, {Phase.FORWARD: 30.0, Phase.BACKWARD: 70.0}
        ),
    )

    def check(self, profile: Profile) -> Finding | None:
        work = profile.program.imbalance
        assert work is not None
        worst = max(work.fullest, key=lambda rank: work.fullest[rank], default=0)
        always = work.fullest.get(worst, 0.0) > 0.9
        held = holding(profile) if always else None
        enough = SEEN_CORRELATION if held is not None and held.rank == worst else MIN_CORRELATION
        if work.correlation < enough or work.spread < MIN_SPREAD * work.mean:
            return None
        there_ns = sum(profile.spent_ns(phase) for phase in COMPUTING)
        lost_ns = min(PASSES * work.forward_ns_per_unit * work.spread, 0.7 * there_ns)
        lost, waited_ns = shared(profile, lost_ns, COMPUTING), lost_ns
        if held is not None and held.rank == worst:
            # What the others wait for the rank was measured, and need not be told from its tokens.
            lost, lost_ns, waited_ns = held.waits, held.won_ns, held.held_ns
            there_ns = max(there_ns, HIGH * lost_ns)
        if waited_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The fullest rank has {format_share(work.spread / work.mean)} more {work.unit} than"
            " the mean, and all wait for it.",
            lost_ns=lost,
            low_ns=LOW * lost_ns,
            high_ns=min(HIGH * lost_ns, there_ns),
            assumption="every step takes as long as its fullest rank, and each has the mean then",
            evidence=(
                f"A step has {work.mean:,.0f} {work.unit} on a rank, and {work.mean + work.spread:,.0f} on"
                " its fullest.",
                f"A forward pass takes {format_duration(work.forward_ns_per_unit)} longer for each one more"
                f" (correlation {work.correlation:.2f}): {format_ms(lost_ns)} of each step, with the"
                " backward pass.",
            ),
            fix=f"Deal out batches with as many {work.unit} to each rank.",
            ranks=(worst,) if always else (),
        )
