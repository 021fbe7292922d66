"""One rank's garbage collector stops all ranks"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms
from diagnose.rules._rank_examples import ranks_example
from diagnose.rules._rank_rule import RankRule
from diagnose.rules._ranks import latest

MIN_SHARE = 0.02
"""Collections of young objects take less in any healthy loop."""

LOW, HIGH = 0.6, 1.1
"""Some of the wait would be there without the pauses."""

PAUSED = {Phase.FORWARD: 30.0, Phase.BACKWARD: 50.0, Phase.GC: 20.0}
WAITING = {Phase.FORWARD: 30.0, Phase.BACKWARD: 70.0}


class GcStraggler(RankRule):
    """
    ## What it means
    On one rank Python's garbage collector walks many objects and pauses the loop. The others wait for its
    gradients at the same step.

    ## What to do
    On that rank, or on all, call `gc.collect()` and `gc.freeze()` before the loop; or switch the collector
    off and collect on all ranks at the same step. Look for what this rank alone keeps: a log, a cache.

    ## When it is wrong
    Pauses as long on every rank are `gc-pauses`; where they come at different steps, all ranks lose the sum
    of them, which means do not show.
    """

    needs = ("ranks_comparable",)
    actions = ("gc-freeze",)
    explains = ("gc-pauses",)
    fires_on = (ranks_example(WAITING, PAUSED), ranks_example(PAUSED, WAITING))
    silent_on = (
        ranks_example(PAUSED, PAUSED),
        ranks_example(WAITING, WAITING),
        ranks_example({Phase.FORWARD: 50.0, Phase.BACKWARD: 50.0}, PAUSED),
    )

    def check(self, profile: Profile) -> Finding | None:
        late = latest(profile, (Phase.GC,), in_bursts=True)
        if late is None or late.won_ns < MIN_SHARE * profile.step_time_ns:
            return None
        return Finding(
            rule=self.name,
            summary=f"The garbage collector of rank {late.rank} stops all {len(profile.ranks)} ranks.",
            lost_ns=late.waits,
            low_ns=LOW * late.won_ns,
            high_ns=HIGH * late.won_ns,
            assumption="every step takes as long as its slowest rank",
            evidence=(
                f"Rank {late.rank} spends {format_ms(late.late_ns)} more of each step in the collector than"
                " the others.",
                f"The others wait {format_ms(late.won_ns)} of each step for it, in backward and"
                " collectives.",
            ),
            fix=f"On rank {late.rank}, before the loop: import gc; gc.collect(); gc.freeze().",
            code="gc.collect(); gc.freeze()",
            ranks=(late.rank,),
            actions=self.actions,
        )
