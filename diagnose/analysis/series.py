"""What the single steps show that their mean hides: spikes, their period, and drift."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from diagnose.core.phases import Phase
from diagnose.core.series import Series

Vector = npt.NDArray[np.float64]

SPIKE_STEP_SHARE = 0.5
"""A phase spikes where it takes this part of a usual step more than it usually takes."""

SPIKE_DEVIATIONS = 5.0
"""And this many robust standard deviations more, lest ordinary scatter count."""

MAD_TO_SIGMA = 1.4826

MIN_SPIKES = 3
"""Fewer do not make a period."""

REGULAR_SHARE = 0.7
REGULAR_WITHIN = 0.1
"""Spikes have a period if this part of the intervals between them is within this part of their median."""

MIN_DRIFT_STEPS = 40


def summarize_series(phases: Mapping[Phase, Vector]) -> Series:
    """Summarizes nanoseconds per phase and step, each of shape `(steps,)`."""
    count = len(next(iter(phases.values()), np.zeros(0)))
    if not count:
        return Series()
    step_ns = float(np.median(sum(phases.values(), np.zeros(count))))
    median: dict[Phase, float] = {}
    spike_ns: dict[Phase, float] = {}
    spike_share: dict[Phase, float] = {}
    period: dict[Phase, int] = {}
    drift: dict[Phase, float] = {}
    for phase, times in phases.items():
        usual = float(np.median(times))
        spread = MAD_TO_SIGMA * float(np.median(np.abs(times - usual)))
        spikes = times - usual > max(SPIKE_STEP_SHARE * step_ns, SPIKE_DEVIATIONS * spread)
        median[phase] = usual
        spike_ns[phase] = float((times[spikes] - usual).sum()) / count
        spike_share[phase] = float(spikes.mean())
        found = find_period(np.flatnonzero(spikes))
        if found is not None:
            period[phase] = found
        drift[phase] = find_drift(times[~spikes])
    return Series(
        median_ns=median, spike_ns=spike_ns, spike_share=spike_share, period=period, drift_ns=drift
    )


def find_period(indices: npt.NDArray[np.int64]) -> int | None:
    """Returns the usual interval between indices if they come regularly; runs of neighbours count once."""
    if len(indices):
        indices = indices[np.concatenate(([True], np.diff(indices) > 1))]
    intervals = np.diff(indices)
    if len(indices) < MIN_SPIKES:
        return None
    usual = float(np.median(intervals))
    regular = np.abs(intervals - usual) <= max(1.0, REGULAR_WITHIN * usual)
    return round(usual) if float(regular.mean()) >= REGULAR_SHARE else None


def find_drift(times: Vector) -> float:
    """Returns by how much times grew from the first quarter to the last; 0 unless every quarter grew."""
    if len(times) < MIN_DRIFT_STEPS:
        return 0.0
    quarters = [float(np.median(part)) for part in np.array_split(times, 4)]
    grew = all(late > early for early, late in pairwise(quarters))
    return quarters[-1] - quarters[0] if grew else 0.0
