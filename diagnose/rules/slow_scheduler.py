"""The learning-rate schedule takes long"""

from __future__ import annotations

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, LineRule, at

OF_ANOTHER = (Phase.FORWARD, Phase.BACKWARD, Phase.COMMUNICATION)
"""What a schedule of the rate does not do: `schedule.step(batch)` is that of a pipeline there."""


class SlowScheduler(LineRule):
    """
    ## What it means
    `scheduler.step()` runs Python for each parameter group, and whatever function it was given.

    ## What to do
    Use one parameter group for all parameters of the same settings, and a schedule that only computes a
    number.

    ## When it is wrong
    A schedule that looks at the model on purpose.
    """

    explains = (STRAGGLER,)
    idiom = "schedule"
    what = "The learning-rate schedule"
    assumption = "a schedule that only computes a number costs nothing"
    fix = "Make the function of the schedule cheap, and merge parameter groups that have the same settings."
    fires_on = (
        profile(other_ms=12, where=(at("scheduler.step()", 0.1, "schedule", phase=Phase.OPTIMIZER),)),
        profile(other_ms=12, where=(at("scheduler.step()", 0.03, "schedule"),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("scheduler.step()", 0.01, "schedule"),)),
        profile(
            communication_ms=40,
            where=(at("schedule.step(batch)", 0.4, "schedule", phase=Phase.COMMUNICATION),),
        ),
    )

    def lines(self, profile: Profile) -> tuple[SourceLine, ...]:
        return tuple(line for line in super().lines(profile) if line.phase not in OF_ANOTHER)
