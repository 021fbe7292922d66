"""Averaged weights are updated in each step, mostly tensor by tensor"""

from __future__ import annotations

from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, LineRule, at

CALLS = ("update_parameters(", ".update(", "_foreach_")

AT_ONCE = "whole"
AT_ONCE_SHARE = 0.05
"""One call for all tensors is what this rule asks for, and costs what averaging costs. Only from here on is
it worth to average less often."""

LEAST = 0.3
"""One call for all tensors still has to read and write them."""


class SlowEma(LineRule):
    """
    ## What it means
    A moving average of the weights is updated in each step: in a Python loop, by one or more small
    operations per tensor, or in a call. One call for all tensors is said only from 5 % of the step on.

    ## What to do
    Update all tensors in one call, or once every few steps with the decay raised to that power.

    ## When it is wrong
    An average that differs from tensor to tensor.
    """

    explains = (STRAGGLER,)
    idiom = "ema"
    beside = ("log", "clip", "wait")
    least = LEAST
    what = "Averaging weights"
    assumption = "a call for all tensors at once, or every few steps, costs little beside that"
    fix = (
        "Replace the loop by one torch._foreach_lerp_ over lists of the tensors, or by "
        "AveragedModel with get_ema_multi_avg_fn, and update every few steps."
    )
    code = "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))"
    fires_on = (
        profile(other_ms=12, where=(at("average.mul_(decay).add_(p)", 0.1, "ema"),)),
        profile(other_ms=12, where=(at("update_ema()", 0.03, "ema"),)),
        profile(other_ms=12, where=(at("torch._foreach_lerp_(kept, now, r)", 0.06, "ema", "whole"),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("average.mul_(decay).add_(p)", 0.01, "ema"),)),
        profile(other_ms=12, where=(at("p.grad.mul_(scale)", 0.1, "clip"),)),
        profile(other_ms=12, where=(at("torch._foreach_lerp_(kept, now, r)", 0.04, "ema", "whole"),)),
    )

    def lines(self, profile: Profile) -> tuple[SourceLine, ...]:
        lines = super().lines(profile)
        at_once = sum(line.share for line in lines if AT_ONCE in line.idiom)
        return tuple(line for line in lines if AT_ONCE not in line.idiom or at_once >= AT_ONCE_SHARE)

    def cure(self, line: SourceLine) -> tuple[str, str]:
        """See `LineRule.cure`. A call may do all tensors at once already, as `AveragedModel` does,
        and a package's loop is not the script's to replace."""
        if line.via or any(call in line.text for call in CALLS):
            return (
                "Average every few steps, with the decay raised to that power. AveragedModel takes all"
                " tensors in one call unless it is given an avg_fn: then give it a multi_avg_fn instead.",
                "",
            )
        return self.fix, self.code
