"""What was tried on a running job, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from diagnose.core.finding import Gain
from diagnose.core.phases import Phase


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


IN_PLACE = "measured in the place of "
"""Begins the reason of a trial that was measured against a kept fix, not against the script's own steps."""


class Outcome(Enum):
    """What became of an action."""

    KEPT = "kept"
    REVERTED = "reverted"
    """Measured, and no faster, or it failed: undone."""
    HARMED = "harmed"
    """The loss went wrong in its trial: undone; weights are put back where that is sure."""
    REFUSED = "refused"
    """Never tried: a precondition does not hold."""
    NOT_ALLOWED = "not_allowed"
    """Never tried: it needs the user's leave."""
    NOT_TRIED = "not_tried"
    """Never tried: a dry run."""
    NOT_YET = "not_yet"
    """Not tried so far: a precondition may come to hold. Never recorded: if it does not, it is refused."""
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
        without_ns: Mean nanoseconds of a step without the change.
        with_ns: Likewise with it.
    """

    speedup: float
    low: float
    high: float
    pairs: int
    detectable: float
    without_ns: float
    with_ns: float


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
    settings: Mapping[str, str] = field(default_factory=dict)

    def as_record(self) -> dict[str, Any]:
        """Returns the trial in JSON's types."""
        return {**asdict(self), "safety": self.safety.value, "outcome": self.outcome.value}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Trial:
        """Returns the trial that `as_record` wrote.

        Raises:
            KeyError, TypeError, ValueError: If it is no such record.
        """
        predicted, measured = record["predicted"], record["measured"]
        return cls(
            **{
                **record,
                "safety": Safety(record["safety"]),
                "outcome": Outcome(record["outcome"]),
                "predicted": Gain(**predicted) if predicted else None,
                "measured": Measured(**measured) if measured else None,
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What tuning did in one run.

    Attributes:
        state: What it was doing last: `observing`, `trying`, `confirming`, `holding`, `waiting`, `paused`,
            `frozen` or `ended`.
        diagnosed: Whether the script lived long enough for the rules to be asked.
        left: Rules that named fixes when they were asked last, with something kept in force; `None` if they
            were not asked then.
        trials: Every action that was thought of, in order.
        confirmation: All kept actions on against all off; `None` if nothing was kept, or the script ended
            before, or what is kept is no longer what was measured.
        earlier: The same of the first `num_earlier` kept actions, where others were kept since and
            the script ended before all were measured together.
        num_earlier: How many these were.
        rechecks: Later measurements of what `confirmation` is of.
        undone: Why everything kept was undone after all; empty if it was not.
        dropped: Name of each action that was kept first and lost later (it gave itself up, the user asked
            for that, ...) and not kept again, with the reason.
        errors: What failed in us, in words.
        frozen: Why the ranks stopped deciding together and left all as it was; empty if they did not.
        in_force: Names of the actions that were in force then.
        untouched: First and last (exclusive) step before anything was changed.
        left_alone: Likewise of the steps after all trials, where none of them kept anything; else `None`.
        tuned: Likewise of the steps with everything kept in force; `None` if there are none.
        tuned_phase_time_ns: Mean nanoseconds of each phase in those steps.
        tuned_median_ns: Their median; `None` if there are none.
        tuned_samples_per_s: Samples per second in those steps: of all ranks, as far as the others gained
            what the first one did. `None` when no batch size could be read.
    """

    state: str = ""
    diagnosed: bool = True
    left: tuple[str, ...] | None = None
    trials: tuple[Trial, ...] = ()
    confirmation: Measured | None = None
    earlier: Measured | None = None
    num_earlier: int = 0
    rechecks: tuple[Measured, ...] = ()
    undone: str = ""
    dropped: Mapping[str, str] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    frozen: str = ""
    in_force: tuple[str, ...] = ()
    untouched: tuple[int, int] = (0, 0)
    left_alone: tuple[int, int] | None = None
    tuned: tuple[int, int] | None = None
    tuned_phase_time_ns: Mapping[Phase, float] = field(default_factory=dict)
    tuned_median_ns: float | None = None
    tuned_samples_per_s: float | None = None

    @property
    def as_it_is(self) -> tuple[int, int]:
        """First and last (exclusive) step of the longest part in which the script trains as it is."""
        return max(self.untouched, self.left_alone or self.untouched, key=lambda part: part[1] - part[0])

    @property
    def kept(self) -> tuple[Trial, ...]:
        """The actions that stayed in force to the end, of the run or of what they worked on."""
        kept = {
            trial.action: trial  # the last, where one was lost and kept again
            for trial in self.trials
            if trial.outcome is Outcome.KEPT and trial.action not in self.dropped
        }
        return () if self.undone or (self.errors and not self.frozen) else tuple(kept.values())

    @property
    def confirmed(self) -> tuple[Measured, str] | None:
        """What stayed in force on against off, and what it is of: `all`, or `the first 2`; `None` where
        nothing stayed, or nothing was confirmed."""
        if self.kept and self.confirmation is not None:
            return self.confirmation, "all"
        return (self.earlier, f"the first {self.num_earlier}") if self.kept and self.earlier else None
