"""What a rule says of a run: a named fault, its evidence, what to do, and what that would win."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diagnose.core.phases import Phase

MAX_SPEEDUP = 100.0
"""More than this is never promised: some of a step always remains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How many times faster training would be without the fault.

    Attributes:
        speedup: 1.25 is a quarter more steps per second.
        low: Lower end of what to expect; 1 is no gain at all.
        high: Upper end.
    """

    speedup: float
    low: float
    high: float

    @classmethod
    def of(cls, step_time_ns: float, *, lost_ns: float, low_ns: float, high_ns: float) -> Gain:
        """Returns the gain of winning `lost_ns` of each step, at least `low_ns`, at most `high_ns`."""

        def speedup(won_ns: float) -> float:
            least_ns = step_time_ns / MAX_SPEEDUP or step_time_ns  # of a step of no time at all
            return step_time_ns / max(step_time_ns - won_ns, least_ns)

        return cls(speedup=speedup(lost_ns), low=speedup(max(0.0, low_ns)), high=speedup(high_ns))


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of one run.

    Attributes:
        rule: Name of the rule.
        summary: The fault in one sentence, with its size.
        lost_ns: Nanoseconds of the mean step, by the phase they are part of, that would be won if the fault
            were gone: exposed time only.
        low_ns: The least that would be won, of all phases together.
        high_ns: The most.
        assumption: What the estimate takes for granted, in words.
        evidence: The readings that prove it, one sentence each.
        fix: The exact thing to do, with the script's own names and numbers.
        code: The line to paste, where there is one.
        file: The file to blame, absolute; empty when no line is to blame.
        line: Its line, from 1; 0 with no file.
        ranks: The ranks that have the fault; empty means all.
        actions: Names of the actions that help, the best first.
        won_ns: Of actions that win only a part of what is lost: nanoseconds of the mean step, by name.
        fix_won_ns: Of the fix in words, where it wins only a part of that.

    Raises:
        ValueError: If no time is lost, or the bounds do not enclose it.
    """

    rule: str
    summary: str
    lost_ns: Mapping[Phase, float]
    low_ns: float
    high_ns: float
    assumption: str
    evidence: tuple[str, ...]
    fix: str
    code: str = ""
    file: str = ""
    line: int = 0
    ranks: tuple[int, ...] = ()
    actions: tuple[str, ...] = ()
    won_ns: Mapping[str, float] = field(default_factory=dict)
    fix_won_ns: float | None = None

    def __post_init__(self) -> None:
        if not self.lost_ns_per_step > 0 or min(self.lost_ns.values()) < 0:
            raise ValueError(f"{self.rule}: a finding without lost time: {dict(self.lost_ns)}")
        if not self.low_ns <= self.lost_ns_per_step * (1 + 1e-9) <= self.high_ns * (1 + 2e-9):
            raise ValueError(
                f"{self.rule}: {self.lost_ns_per_step:.0f} ns are not within"
                f" {self.low_ns:.0f} to {self.high_ns:.0f}"
            )

    @property
    def lost_ns_per_step(self) -> float:
        """Nanoseconds of the mean step that would be won if the fault were gone."""
        return sum(self.lost_ns.values())

    @property
    def fixed_ns_per_step(self) -> float:
        """Nanoseconds of the mean step that the fix in words wins."""
        return self.lost_ns_per_step if self.fix_won_ns is None else self._of_lost(self.fix_won_ns)

    def gain(self, step_time_ns: float, action: str = "") -> Gain:
        """Returns how much faster steps of this mean time would be without the fault.

        Args:
            step_time_ns: The mean step with it.
            action: An action that is to mend it; empty for the fault's end, however it comes.
        """
        return self._gain(step_time_ns, self._of_lost(self.won_ns.get(action, self.lost_ns_per_step)))

    def gain_of_fix(self, step_time_ns: float) -> Gain:
        """Returns how much faster steps of this mean time would be with the fix in words."""
        return self._gain(step_time_ns, self.fixed_ns_per_step)

    def _of_lost(self, won_ns: float) -> float:
        """Returns what is won where other findings have taken a part of what was lost."""
        return min(won_ns, self.lost_ns_per_step)

    def _gain(self, step_time_ns: float, won_ns: float) -> Gain:
        low_ns = min(self.low_ns, won_ns)
        return Gain.of(step_time_ns, lost_ns=won_ns, low_ns=low_ns, high_ns=self.high_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Abstention:
    """A rule that could not be asked, and which signal it missed."""

    rule: str
    missing: str
