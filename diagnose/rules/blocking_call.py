"""The loop sleeps or waits for another process"""

from __future__ import annotations

from dataclasses import replace

from diagnose.analysis.lateness import WAITS
from diagnose.core.parallel import Ddp
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Program
from diagnose.rules._examples import profile
from diagnose.rules._lines import LineRule, at, holding_up_batches


class BlockingCall(LineRule):
    """
    ## What it means
    A line of the loop does nothing but wait: it sleeps, or it started a program and waits for its end, or
    for a lock or an answer. The device and the CPUs are idle meanwhile. What a line calls may say so; else
    that the thread uses no CPU in it does, where no device, disk or other thread of the script is to blame.

    ## What to do
    Remove the wait, start the program and look after it later, or wait in a background thread.

    ## When it is wrong
    A pause on purpose, such as one that limits the heat or the rate.
    """

    idiom = "wait"
    what = "Waiting"
    assumption = "the loop need not wait there"
    fix = "Take the wait out of the loop."
    fires_on = (
        profile(other_ms=12, where=(at("time.sleep(0.01)", 0.1, "wait"),)),
        profile(other_ms=12, where=(at("subprocess.run(command)", 0.03, "wait"),)),
        profile(
            data_wait_ms=12,
            where=(replace(at("answers.get()", 0.1, "wait", phase=Phase.DATA_WAIT), between=0.1),),
        ),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("time.sleep(0.001)", 0.01, "wait"),)),
        profile(data_wait_ms=12, where=(at("in_dataset.get()", 0.1, "wait", phase=Phase.DATA_WAIT),)),
        profile(
            program=Program(ddp=(Ddp(),)),
            where=(at("time.sleep(0.01)", 0.1, "wait", phase=Phase.BACKWARD),),
        ),
        profile(
            program=Program(ddp=(Ddp(),)),
            where=(at("time.sleep(0.01)", 0.1, "wait", phase=Phase.COMMUNICATION),),
        ),
    )

    def lines(self, profile: Profile) -> tuple[SourceLine, ...]:
        """See `LineRule.lines`, and what waits for something that the batch or the loss is made with. What
        waits among ranks in or after the backward pass is communication."""
        lines = (*super().lines(profile), *holding_up_batches(profile))
        if not profile.program.ddp:
            return lines
        return tuple(line for line in lines if line.phase not in WAITS)
