"""What is known of the difference between two runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from diagnose.core.phases import Phase


class Outcome(str, Enum):
    """The three ends of a comparison. `CANNOT_TELL` is never rounded to one of the others."""

    FASTER = "faster"
    SLOWER = "slower"
    CANNOT_TELL = "cannot_tell"

    @property
    def label(self) -> str:
        """The outcome in the words of a sentence: `cannot tell`."""
        return self.value.replace("_", " ")


class Unit(str, Enum):
    """What a compared quantity is counted in. Of a time less is better, of a rate more."""

    NS = "ns"
    PER_S = "per_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One quantity in two runs, and whether its difference can be told from noise.

    Attributes:
        name: `samples_per_s`, `step_time`, or the phase's name.
        unit: What `before`, `after` and `noise` are counted in.
        before: The first run's value; `None` when it was not measured.
        after: The second run's value.
        noise: What the difference was judged against: one that is smaller may be chance. `None` when
            the difference could not be judged at all.
        reason: Why there is no verdict, where the noise alone does not say it.
    """

    name: str
    unit: Unit
    before: float | None
    after: float | None
    noise: float | None
    reason: str = ""

    @property
    def outcome(self) -> Outcome:
        """Faster or slower only where the difference exceeds the noise."""
        if self.before is None or self.after is None or self.noise is None:
            return Outcome.CANNOT_TELL
        difference = self.after - self.before
        if not abs(difference) > self.noise:
            return Outcome.CANNOT_TELL
        return Outcome.FASTER if (difference > 0) == (self.unit is Unit.PER_S) else Outcome.SLOWER

    @property
    def change_share(self) -> float | None:
        """The difference as a part of `before`; `None` where there is nothing to divide by."""
        if self.before is None or self.after is None or not self.before:
            return None
        return self.after / self.before - 1

    @property
    def noise_share(self) -> float | None:
        """The noise as a part of `before`."""
        return None if self.noise is None or not self.before else self.noise / self.before


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs, quantity by quantity.

    Attributes:
        metrics: Throughput and step time; the first that was measured in both is the headline.
        phases: Mean time per step of each phase that either run measured.
        num_steps: Measured steps of the first and of the second run.
        notes: What makes the runs hard to compare: another device, other batch sizes.
    """

    metrics: tuple[Change, ...]
    phases: tuple[Change, ...]
    num_steps: tuple[int, int]
    notes: tuple[str, ...] = ()

    @property
    def headline(self) -> Change:
        """The change that the verdict is about."""
        measured = (change for change in self.metrics if change.noise is not None)
        return next(measured, self.metrics[-1])

    def phase(self, phase: Phase) -> Change | None:
        """Returns the change of one phase, if either run measured it."""
        return next((change for change in self.phases if change.name == phase.value), None)
