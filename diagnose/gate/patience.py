"""How long a run may take before it is said to hang."""

from __future__ import annotations

from diagnose.gate.measure import OutOfTime
from diagnose.gate.result import Failure, TrainingFailed

HANGS = 10.0
"""A run that takes so many times as long as it should hangs: the head's rehearsal as long as the base's."""

LEAST_PATIENCE_S = 300.0
"""Nothing is said to hang before: a version may have something to compile or to download first. Of a short
budget it is half of what is left, or a head that hangs would only ever use it up."""

SUSPECT = 3.0
"""A run that the budget's end finds so many times as long as it should be spoils the others' verdict."""


def time_limit(usual_s: float, left_s: float) -> float:
    """Returns after how many seconds to end a run; infinite for never.

    Args:
        usual_s: What such a run takes; infinite where that is not known.
        left_s: What is left of the budget; infinite without one.
    """
    return min(_patience_s(usual_s, left_s), left_s)


def hang(name: str, usual_s: float, left_s: float, late: OutOfTime) -> TrainingFailed | None:
    """Returns the failure of a run that was out of time; `None` where it was the budget that ended."""
    patience_s = _patience_s(usual_s, left_s)
    if left_s <= patience_s:
        return None
    reason = not_ended(name, patience_s, usual_s)
    return TrainingFailed(Failure(run=name, reason=reason, last_lines=late.last_lines))


def not_ended(name: str, after_s: float, usual_s: float) -> str:
    """Says that a run takes too long."""
    return (
        f"{name} had not ended after {after_s:.0f} s, where such a run takes {usual_s:.0f} s: "
        "it hangs, or is very much slower"
    )


def _patience_s(usual_s: float, left_s: float) -> float:
    return max(HANGS * usual_s, min(LEAST_PATIENCE_S, left_s / 2))
