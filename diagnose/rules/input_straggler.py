"""One rank waits for its data, and all others for that rank"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms
from diagnose.rules._rank_examples import ranks_example
from diagnose.rules._rank_rule import RankRule
from diagnose.rules._ranks import latest

MIN_SHARE = 0.04
"""Ranks differ by less without anything being wrong."""

LOW, HIGH = 0.6, 1.2
"""Some of the wait would be there without the late rank."""

LATE = {Phase.DATA_WAIT: 30.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0}
WAITING = {Phase.DATA_WAIT: 2.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 78.0}
STANDING = {Phase.DATA_WAIT: 1.0, Phase.OTHER: 29.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 50.0}
ALIKE = {Phase.DATA_WAIT: 30.0, Phase.FORWARD: 20.0, Phase.BACKWARD: 51.0}


class InputStraggler(RankRule):
    """
    ## What it means
    One rank waits longer than the others for its batch. Gradients are averaged over all, so every rank
    loses that time, in its backward pass or in the next collective.

    ## What to do
    Look at what this rank alone reads: its shard, its disk, its workers, its neighbours on the machine.

    ## When it is wrong
    A rank that sleeps, or waits for a process, between its passes is found too, and said to stand still:
    that need not be its input. What its loop computes of a batch that it has is `compute-straggler`'s.
    Batches that must differ in their cost from rank to rank.
    """

    needs = ("ranks_comparable",)
    explains = ("blocking-call",)
    fires_on = (
        ranks_example(WAITING, LATE),
        ranks_example(LATE, WAITING),
        ranks_example(STANDING, WAITING, standing_ms=28.0),
    )
    silent_on = (
        ranks_example(ALIKE, LATE),
        ranks_example(WAITING, WAITING),
        ranks_example(STANDING, WAITING),
        ranks_example(LATE, WAITING, working_ms=28.0),
    )

    def check(self, profile: Profile) -> Finding | None:
        late = latest(profile, (Phase.DATA_WAIT,))
        if late is None or late.late_ns < MIN_SHARE * profile.step_time_ns:
            return None
        one = profile.rank(late.rank)
        name, longer = late.who, format_ms(late.late_ns)
        several = len(late.ranks) > 1
        whom = "them" if several else f"rank {late.rank}"
        alone = f"{late.host or 'them'} alone" if several else f"rank {late.rank} alone"
        if 2 * one.standing_ns > late.late_ns:  # most of it in the loop's own lines, not in a loader
            stands = "stand" if several else "stands"
            summary = f"{name} {stands} still between the passes, and the others wait for {whom}."
            seen = (
                f"Rank {late.rank} sleeps or waits {longer} longer than the others, in lines of its loop."
            )
            fix = f"Find what holds up {alone} there: the input, or something else."
        else:
            waits = "wait for their" if several else "waits for its"
            summary = f"{name} {waits} data, and the others for {whom}."
            seen = f"Rank {late.rank} waits {longer} longer for a batch than the others."
            fix = f"Find what slows the input of {alone}."
        return Finding(
            rule=self.name,
            summary=summary,
            lost_ns=late.waits,
            low_ns=LOW * late.won_ns,
            high_ns=HIGH * late.won_ns,
            assumption="every step takes as long as its slowest rank",
            evidence=(
                seen,
                f"The others spend {format_ms(late.held_ns)} more in backward and collectives: they wait"
                " there.",
            ),
            fix=fix,
            ranks=late.ranks,
        )
