"""What was tried on a running job, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from diagnose.core.finding import Gain


class Safety(Enum):
    """What a fix does to the numbers that training computes."""

    EXACT = "exact"
    """Bit for bit the same."""
    ROUNDING = "rounding"
    """The same arithmetic, rounded in another order."""
    PRECISION = "precision"
    """Fewer bits: TF32, autocast, low-precision communication."""
    TRAINING = "training"
    """Other dynamics: batch size, accumulation, lossy optimizer states."""


ASKED_FOR = (Safety.PRECISION, Safety.TRAINING)
"""What is tried only where the user allows it."""


class Outcome(Enum):
    """What became of an action."""

    KEPT = "kept"
    REVERTED = "reverted"
    """Measured, and no faster, or it failed: undone."""
    REFUSED = "refused"
    """Never tried: a precondition does not hold."""
    NOT_ALLOWED = "not_allowed"
    """Never tried: it needs the user's leave."""
    CANNOT_TELL = "cannot_tell"
    """Measured as long as was worth it, without a verdict: undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A paired measurement: the same job with a change and without, in turn.

    Attributes:
        speedup: How many times faster steps were with the change.
        low: Lower end of the interval that holds the true value at the stated confidence.
        high: Upper end.
        pairs: Pairs of windows it rests on.
        detectable: The smallest speedup that so many pairs would find four times in five.
    """

    speedup: float
    low: float
    high: float
    pairs: int
    detectable: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One action that was thought of, and what became of it.

    Attributes:
        action: The action's name.
        value: What it was set to, such as a number of workers; `None` where there is nothing to choose.
        safety: What it does to the numbers.
        outcome: What became of it.
        reason: Why, in words for the user.
        predicted: What the finding that led to it expected.
        measured: What pairs of windows showed; `None` if none were run.
        rule: The finding that led to it.
        first_step: The step at which it began.
        steps_spent: Steps that the trial took. All of them trained.
        step_ns: Mean nanoseconds of a step without and with it; empty if not measured.
        settings: What makes it permanent in a script: argument or call, and value.
    """

    action: str
    safety: Safety
    outcome: Outcome
    reason: str
    value: int | None = None
    predicted: Gain | None = None
    measured: Measured | None = None
    rule: str = ""
    first_step: int = 0
    steps_spent: int = 0
    step_ns: tuple[float, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
