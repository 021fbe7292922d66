"""Faults that are there in some of the steps, which are compared with the others"""

from __future__ import annotations

from collections.abc import Mapping

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile
from diagnose.core.series import NowAndThen, Series
from diagnose.core.units import format_duration, format_share

LEAST_TIMES = 3
"""Fewer are a look at one thing: that is what it is for."""

MEASURED_BOUNDS = (0.6, 1.2)


def steps_with(name: str, profile: Profile) -> NowAndThen | None:
    """Returns what is known of something that is switched on and off again and again, if it is."""
    found = profile.series.now_and_then.get(name)
    return found if found is not None and found.times >= LEAST_TIMES else None


def of_some_steps(found: NowAndThen) -> str:
    """Says how much longer these steps take."""
    more_ns = sum(found.more_ns.values()) / found.share
    return (
        f"It was switched on and off {found.times} times. The {format_share(found.share)} of the steps in"
        f" which it was on take {format_duration(more_ns)} more than the others."
    )


def in_some_steps(name: str, more_ns: Mapping[Phase, float], times: int = 20) -> Series:
    return Series(now_and_then={name: NowAndThen(times=times, share=0.2, more_ns=more_ns)})
