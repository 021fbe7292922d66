"""The line of the user's code that workers spend most of their time in."""

from __future__ import annotations

from dataclasses import dataclass

from diagnose.core.profile import Profile, SourceLine
from diagnose.core.program import Loader

MIN_SHARE = 0.2
"""A line with less of the workers' time is not what makes them slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where workers are slow: the line, or the loader where no line stands out.

    Attributes:
        file: Absolute; empty when unknown.
        line: Its line.
        at: ` at decode`, to end a sentence with; empty where no line stands out.
        evidence: The sentence that shows the line, if there is one.
    """

    file: str
    line: int
    at: str = ""
    evidence: tuple[str, ...] = ()

    @classmethod
    def seen(cls, line: SourceLine) -> Where:
        """Returns the place of a sampled line that stands out."""
        shown = (f"Most of it is spent at: {line.text}",) if line.text else ()
        return cls(file=line.file, line=line.line, at=f" at {line.function}", evidence=shown)


def where_slow(profile: Profile, loader: Loader) -> Where:
    """Returns the line that a loader's workers spend most of their time in."""
    lines = [line for line in profile.where if line.in_worker and line.share >= MIN_SHARE]
    if not lines:
        return Where(file=loader.file, line=loader.line)
    return Where.seen(max(lines, key=lambda line: line.share))
