"""Metrics are computed in each step"""

from __future__ import annotations

from dataclasses import replace

from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._examples import profile
from diagnose.rules._lines import STRAGGLER, LineRule, at
from diagnose.rules._own_code import scores_now_and_then
from diagnose.rules.step_jitter import RARE_SCORE, long_steps_ns

LEAST = 0.3
"""A metric computed with tensor operations still takes some."""


class SlowMetrics(LineRule):
    """
    ## What it means
    Accuracy and the like are computed from every batch, often in Python or numpy, and read back at
    once.

    ## What to do
    Compute them every N steps, on the device, and from `detach()`ed outputs; leave exact figures to the
    evaluation.

    ## When it is wrong
    A metric that steers the training in each step.
    """

    explains = (STRAGGLER, "gc-pauses")
    idiom = "metric"
    beside = ("log", "clip", "ema", "wait")
    least = LEAST
    what = "Computing metrics"
    assumption = "metrics are computed rarely enough for their cost to vanish"
    fix = "Compute the metric every 100 steps, with tensor operations on the whole batch."
    code = "if step % 100 == 0: ..."
    fix_beside = "Or use tensor operations on the whole batch."
    fires_on = (
        profile(other_ms=12, where=(at("hits += accuracy(out, y)", 0.1, "metric"),)),
        profile(other_ms=12, where=(at("score(out)", 0.03, "metric", "sync"),)),
        replace(RARE_SCORE, host=HostStats()),  # `step-jitter` abstains
        profile(
            other_ms=12,
            gc_ms=5,
            where=(
                at("key = a.item(), b.item()", 0.1, "metric"),
                at("key = ...", 0.04, "metric", phase=Phase.GC),
            ),
        ),
    )
    silent_on = (
        profile(),
        profile(other_ms=12, where=(at("hits += accuracy(out, y)", 0.01, "metric"),)),
        profile(gc_ms=10, where=(at("hits += accuracy(out, y)", 0.1, "metric", phase=Phase.GC),)),
        profile(other_ms=12, where=(at("print(accuracy)", 0.1, "log", "metric"),)),
        profile(evaluation_ms=10, where=(at("score(out)", 0.1, "metric", phase=Phase.EVALUATION),)),
        RARE_SCORE,
    )

    def lines(self, profile: Profile) -> tuple[SourceLine, ...]:
        """See `LineRule.lines`. What only a few steps do, at no regular interval, is `step-jitter`'s."""
        lines = super().lines(profile)
        if Phase.OTHER not in long_steps_ns(profile):
            return lines
        return tuple(line for line in lines if not scores_now_and_then(line))
