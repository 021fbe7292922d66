"""How steps differ from one another over a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diagnose.core.phases import Phase

MOST_TIMES = 200
"""So often at most it is noted that something was switched on and off again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NowAndThen:
    """Something that is on in some steps and not in others.

    Attributes:
        times: How often it was switched on and off.
        share: Part of the steps in which it was on, for a while at least.
        more_ns: What each phase takes more in these steps than in the others, in nanoseconds per step of
            all; only phases of which that is clearly more than chance.
    """

    times: int
    share: float
    more_ns: Mapping[Phase, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """What the single steps show that their mean hides. All of the measured steps of the first rank.

    Attributes:
        median_ns: Median nanoseconds of each phase in a step: what a usual step spends there.
        spike_ns: Mean nanoseconds per step (of all steps) that each phase spends above its usual, in steps
            where it takes far longer than usual. A phase that a usual step does not have spikes in each
            step that has it.
        spike_share: Part of the steps in which a phase takes far longer than usual, by phase.
        period: Steps between the spikes of a phase where they come regularly, by phase.
        drift_ns: By how much each phase's usual time grew from the run's first quarter to its last, spikes
            left out; 0 unless it grew all along, and by more than chance.
        by_tokens: How closely the time of a step goes with its tokens, -1 to 1; `None` where all steps have
            as many, or it is not known how many.
        now_and_then: What is on in some steps only: `anomaly` for torch's anomaly detection, `profiler` for
            its profiler.
    """

    median_ns: Mapping[Phase, float] = field(default_factory=dict)
    spike_ns: Mapping[Phase, float] = field(default_factory=dict)
    spike_share: Mapping[Phase, float] = field(default_factory=dict)
    period: Mapping[Phase, int] = field(default_factory=dict)
    drift_ns: Mapping[Phase, float] = field(default_factory=dict)
    by_tokens: float | None = None
    now_and_then: Mapping[str, NowAndThen] = field(default_factory=dict)

    def each_ns(self, phase: Phase) -> float | None:
        """Returns the mean nanoseconds that one spike of the phase takes more than usual."""
        share = self.spike_share.get(phase)
        return self.spike_ns[phase] / share if share else None
