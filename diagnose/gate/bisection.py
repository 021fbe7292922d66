"""What a search for the slow commit is asked, and what it came to."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from diagnose.gate.pairs import Asked
from diagnose.gate.posterior import Odds
from diagnose.gate.result import Judgement, Reason

CONFIDENCE = 0.95
"""Odds at which a commit is named. One in twenty is wrong; the pairs with its parent then show it."""

MAX_PAIRS = 100
"""The search ends here: after so many, what is open is how the commits differ, not how the runs scatter."""


class Ending(str, Enum):
    """How a search ends. Only `FOUND` names a commit."""

    FOUND = "found"
    CANNOT_TELL = "cannot_tell"
    NO_LOSS = "no_loss"
    FAILED = "failed"

    @property
    def exit_code(self) -> int:
        """What `diagnose bisect` exits with; 3 and 5 are those of `diagnose gate`."""
        return {"found": 0, "cannot_tell": 3, "no_loss": 3, "failed": 5}[self.value]


@dataclass(frozen=True, slots=True, kw_only=True)
class BisectRequest:
    """What to search, and with what.

    Attributes:
        asked: What to judge; `max_drop` is the least loss worth searching for, `budget_s` for all of it.
        commits: `GOOD..BAD`.
        command: The training command.
        links: Paths that git does not hold and each version needs.
        confidence: Odds at which to stop.
        max_pairs: Pairs to measure at most between the ends.
        cwd: Where the user stands.
        folder: Where the runs are kept.
    """

    asked: Asked
    commits: str
    command: tuple[str, ...]
    links: tuple[str, ...] = ()
    confidence: float = CONFIDENCE
    max_pairs: int = MAX_PAIRS
    cwd: Path
    folder: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """One commit of the search.

    Attributes:
        subject: First line of its message.
        is_merge: Whether it brings in other commits, which the search has not looked into.
    """

    hash: str
    subject: str
    is_merge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What a search came to.

    Attributes:
        commits: After the good one, oldest first; the last is the bad one.
        ends: What the pairs of the good and the bad commit say; `None` where it never came to that.
        odds: Of the commits; `None` where nothing was searched.
        suspects: The most likely commit, or several that cannot be told apart, as places in `commits`.
        parent: What the pairs of the commit found and its parent say.
        why: What that difference is attributed to.
        reason: Why no commit is named; empty where one is.
        notes: What else the reader must know.
    """

    ending: Ending
    good: Commit
    commits: tuple[Commit, ...]
    ends: Judgement | None = None
    odds: Odds | None = None
    suspects: range = field(default=range(0))
    parent: Judgement | None = None
    why: tuple[Reason, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    folder: Path | None = None
    wall_s: float = 0.0

    @property
    def certainty(self) -> float:
        """Odds of the suspects together."""
        return sum(self.odds.of[index] for index in self.suspects) if self.odds is not None else 0.0
