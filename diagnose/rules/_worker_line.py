"""The line of the user's code that workers spend most of their time in."""

from __future__ import annotations

from diagnose.core.profile import Profile, SourceLine

MIN_SHARE = 0.2
"""A line with less of the workers' time is not what makes them slow."""


def hottest_line(profile: Profile) -> SourceLine | None:
    """Returns it, or `None` where no line stands out or none was sampled."""
    lines = [line for line in profile.where if line.in_worker and line.share >= MIN_SHARE]
    return max(lines, key=lambda line: line.share) if lines else None
