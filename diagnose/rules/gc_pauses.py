"""The garbage collector stops the loop"""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.units import format_ms, format_share
from diagnose.rules._examples import profile
from diagnose.rules._lines import IN_LOOP, named
from diagnose.rules.base import Rule

MIN_SHARE = 0.02
"""Collections of young objects take less in any healthy loop."""

MOST = 1.1
"""What it walks it also brings into the caches, in place of what the step needs."""

LEAST = 0.8
"""A rare collection of what the loop itself leaves behind remains."""


class GcPauses(Rule):
    """
    ## What it means
    Python's garbage collector walks all objects of the process, and the loop waits. With millions of
    objects, such as a dataset held in lists, a pause takes hundreds of milliseconds; among several ranks
    each pause of one stops all.

    ## What to do
    Call `gc.collect()` and `gc.freeze()` once before the loop: what lives by then is never walked again. Or
    switch the collector off and collect every thousand steps, on all ranks at the same one. Keep data in
    arrays instead of lists of objects.

    ## When it is wrong
    A loop that makes cycles of large objects has to collect them.
    """

    actions = ("gc-freeze",)
    fires_on = (profile(gc_ms=10), profile(gc_ms=2.5, events={"gc": 25}))
    silent_on = (profile(), profile(gc_ms=1.9), profile(other_ms=10))

    def check(self, profile: Profile) -> Finding | None:
        share = profile.share(Phase.GC)
        if share is None or share < MIN_SHARE:
            return None
        lost_ns = profile.phase_time_ns[Phase.GC]
        calls = tuple(
            line
            for line in profile.where
            if "collect" in line.idiom and not line.in_worker and line.phase in (Phase.GC, *IN_LOOP)
        )
        count = profile.events.get("gc", 0)
        evidence = [
            f"{format_ms(lost_ns)} of each step pass inside the collector, measured at its callbacks."
        ]
        if count:
            ranks = f" on {len(profile.ranks)} ranks" if len(profile.ranks) > 1 else ""
            evidence.append(f"{count} full collections in {profile.steps.looked_at} steps{ranks}.")
        if calls:
            evidence.append(f"The script itself asks for collections: {named(calls[0])}.")
        fix = "Before the loop: import gc; gc.collect(); gc.freeze()."
        if calls:
            fix = f"Remove {named(calls[0])} from the loop, or do it once an epoch."
        return Finding(
            rule=self.name,
            summary=f"The garbage collector stops the loop for {format_share(share)} of each step",
            lost_ns={Phase.GC: lost_ns},
            low_ns=LEAST * lost_ns,
            high_ns=MOST * lost_ns,
            assumption="what lives before the loop need not be walked again",
            evidence=tuple(evidence),
            fix=fix,
            code="" if calls else "gc.collect(); gc.freeze()",
            file=calls[0].file if calls else "",
            line=calls[0].line if calls else 0,
            actions=() if calls else self.actions,
        )
