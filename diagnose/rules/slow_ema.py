"""Averaged weights are updated tensor by tensor"""

from __future__ import annotations

from diagnose.rules._examples import profile
from diagnose.rules._lines import LineRule, at

LEAST = 0.3
"""One call for all tensors still has to read and write them."""


class SlowEma(LineRule):
    """
    ## What it means
    A Python loop updates a moving average of the weights, one or more small operations per tensor.

    ## What to do
    Update all tensors in one call, or once every few steps with the decay raised to that power.

    ## When it is wrong
    An average that differs from tensor to tensor.
    """

    idiom = "ema"
    least = LEAST
    what = "Averaging weights one by one"
    assumption = "a call for all tensors at once, or every few steps, costs little beside the loop"
    fix = (
        "Replace the loop by one torch._foreach_lerp_ over lists of the tensors, or by "
        "AveragedModel with get_ema_multi_avg_fn, and update every few steps."
    )
    code = "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))"
    fires_on = (
        profile(other_ms=12, where=(at("average.mul_(decay).add_(p)", 0.1, "ema"),)),
        profile(other_ms=12, where=(at("update_ema()", 0.03, "ema"),)),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("average.mul_(decay).add_(p)", 0.01, "ema"),)),
        profile(other_ms=12, where=(at("p.grad.mul_(scale)", 0.1, "clip"),)),
    )
