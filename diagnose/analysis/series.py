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

RARE_STEP_SHARE = 0.02
"""A phase that a usual step does not have spikes from this part of a usual step on."""

MAD_TO_SIGMA = 1.4826

MIN_SPIKES = 3
"""Fewer do not make a period."""

REGULAR_SHARE = 0.7
REGULAR_WITHIN = 0.1
"""Spikes have a period if this part of the intervals between them is within this part of their median."""

MIN_DRIFT_STEPS = 40

DRIFT_PARTS = 4

STEADY_SHARE = 0.1
"""Each quarter grows by this part of the whole growth or more. What slows a run down at one moment, such as
another program, makes one quarter jump and leaves the others level."""

DRIFT_DEVIATIONS = 4.0
"""And the whole growth is so many standard errors of a quarter's median."""

MEDIAN_ERROR = 1.2533
"""The standard error of a median, in standard errors of a mean."""


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
        least = SPIKE_STEP_SHARE if usual > RARE_STEP_SHARE * step_ns else RARE_STEP_SHARE
        spikes = times - usual > max(least * step_ns, SPIKE_DEVIATIONS * spread)
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
    """Returns by how much times grew from the first quarter to the last; 0 unless each quarter grew, and
    the growth is more than their scatter explains."""
    if len(times) < MIN_DRIFT_STEPS:
        return 0.0
    parts = np.array_split(times, DRIFT_PARTS)
    medians = [float(np.median(part)) for part in parts]
    growth = medians[-1] - medians[0]
    steady = all(late - early >= STEADY_SHARE * growth for early, late in pairwise(medians))
    spread = max(float(np.median(np.abs(part - np.median(part)))) for part in (parts[0], parts[-1]))
    error = MEDIAN_ERROR * MAD_TO_SIGMA * spread / np.sqrt(len(parts[0]))
    return growth if growth > DRIFT_DEVIATIONS * error and growth > 0 and steady else 0.0
