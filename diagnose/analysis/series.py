"""What the single steps show that their mean hides: spikes, their period, and drift."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from diagnose.core.phases import Phase
from diagnose.core.series import Series
from diagnose.core.units import MAD_TO_SIGMA

Vector = npt.NDArray[np.float64]

SPIKE_STEP_SHARE = 0.5
"""A phase spikes where it takes this part of a usual step more than it usually takes."""

SPIKE_DEVIATIONS = 5.0
"""And this many robust standard deviations more, lest ordinary scatter count."""

RARE_STEP_SHARE = 0.02
"""A phase that a usual step does not have spikes from this part of a usual step on."""

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

FINE_PARTS = 16
LEAST_IN_PART = 5
"""Steps of a fine part. What grows in a script does not shrink; another program's work comes and goes."""

FALLS_BACK = 0.8
"""Of the growth: a part that lies this far below one before it has lost nearly all that was gained."""

FALL_DEVIATIONS = 3.0
"""Standard errors of a part that this has to be as well."""

DRIFT_DEVIATIONS = 4.0
"""And the whole growth is so many standard errors of a quarter's level."""

USUAL_QUANTILE = 0.25
"""A quarter's level: what disturbs a run makes steps longer and never shorter, so the lower part of them
moves least."""

RARE_PHASES = (Phase.CHECKPOINT, Phase.EVALUATION, Phase.GC, Phase.COMPILE)
"""What these do they do now and then, and not for the steps in between."""

MIN_PRESENT = 0.1
"""What is far longer in this part of the steps, at a regular interval, is of steps that are made in groups:
experience is gathered for four updates. Whether it grows, those steps alone tell."""

MIN_REST = 0.1
"""A rest of the step that takes less than this part of a phase tells nothing of the machine."""

QUANTILE_ERROR = 1.363
"""The standard error of this quantile of normal values, in standard errors of a mean."""


def summarize_series(phases: Mapping[Phase, Vector], tokens: Vector | None = None) -> Series:
    """Summarizes nanoseconds per phase and step, each of shape `(steps,)`, and the tokens of each step."""
    count = len(next(iter(phases.values()), np.zeros(0)))
    if not count:
        return Series()
    total = sum(phases.values(), np.zeros(count))
    step_ns = float(np.median(total))
    median: dict[Phase, float] = {}
    spike_ns: dict[Phase, float] = {}
    spike_share: dict[Phase, float] = {}
    period: dict[Phase, int] = {}
    drift: dict[Phase, float] = {}
    for phase, times in phases.items():
        if not times.any():  # most phases of most runs
            median[phase] = spike_ns[phase] = spike_share[phase] = drift[phase] = 0.0
            continue
        usual, spikes = find_spikes(times, step_ns)
        median[phase] = usual
        spike_ns[phase] = float((times[spikes] - usual).sum()) / count
        spike_share[phase] = share = float(spikes.mean())
        found = find_period(np.flatnonzero(spikes))
        if found is not None:
            period[phase] = found
        drift[phase] = find_drift(times[~spikes], rest=(total - times)[~spikes])
        if not drift[phase] and found and share >= MIN_PRESENT and phase not in RARE_PHASES:
            drift[phase] = share * find_drift(times[spikes], rest=(total - times)[spikes])
    return Series(
        median_ns=median,
        spike_ns=spike_ns,
        spike_share=spike_share,
        period=period,
        drift_ns=drift,
        by_tokens=_correlation(tokens, total) if tokens is not None else None,
    )


def find_spikes(times: Vector, step_ns: float) -> tuple[float, npt.NDArray[np.bool_]]:
    """Returns what a part of a step usually takes, and in which steps it takes far longer.

    Args:
        times: Nanoseconds of the part, by step.
        step_ns: Nanoseconds of a usual step.
    """
    usual = float(np.median(times))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(times - usual)))
    least = SPIKE_STEP_SHARE if usual > RARE_STEP_SHARE * step_ns else RARE_STEP_SHARE
    return usual, times - usual > max(least * step_ns, SPIKE_DEVIATIONS * spread)


def _correlation(some: Vector, others: Vector) -> float | None:
    """Returns how closely two go together, -1 to 1; `None` where one is always the same."""
    if len(some) < 2 or not some.std() or not others.std():
        return None
    return float(np.corrcoef(some, others)[0, 1])


def find_period(indices: npt.NDArray[np.int64]) -> int | None:
    """Returns the usual interval between indices if they come regularly; runs of neighbours count once."""
    indices = without_neighbours(indices)
    intervals = np.diff(indices)
    if len(indices) < MIN_SPIKES:
        return None
    usual = float(np.median(intervals))
    regular = np.abs(intervals - usual) <= max(1.0, REGULAR_WITHIN * usual)
    return round(usual) if float(regular.mean()) >= REGULAR_SHARE else None


def without_neighbours(indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns ascending indices without those that follow right after another: the first of each run."""
    if not len(indices):
        return indices
    return indices[np.concatenate(([True], np.diff(indices) > 1))]


def find_drift(times: Vector, rest: Vector | None = None) -> float:
    """Returns by how much times grew from the first quarter to the last; 0 unless each quarter grew, the
    growth is more than their scatter explains, and they did not fall back in between.

    Args:
        times: Nanoseconds of a phase, by step.
        rest: Those of the rest of the step: what slows it down too, such as another program, is no growth.
    """
    if len(times) < MIN_DRIFT_STEPS:
        return 0.0
    parts = np.array_split(times, DRIFT_PARTS)
    slowdowns = _slowdowns(rest, float(np.median(times)))
    levels = [
        float(np.quantile(part, USUAL_QUANTILE)) / slowdown
        for part, slowdown in zip(parts, slowdowns, strict=True)
    ]
    growth = levels[-1] - levels[0]
    steady = all(late - early >= STEADY_SHARE * growth for early, late in pairwise(levels))
    spread = max(float(np.median(np.abs(part - np.median(part)))) for part in (parts[0], parts[-1]))
    error = QUANTILE_ERROR * MAD_TO_SIGMA * spread / np.sqrt(len(parts[0]))
    if not (growth > DRIFT_DEVIATIONS * error and growth > 0 and steady):
        return 0.0
    if _falls_back(times, FALL_DEVIATIONS * error * np.sqrt(FINE_PARTS / DRIFT_PARTS)):
        return 0.0
    # The levels told that it grew; by how much is a matter of the whole time, as any loss is.
    return growth * float(np.mean(times)) / float(np.mean(levels))


def _falls_back(times: Vector, least: float) -> bool:
    """Returns whether a part lies below an earlier one by over `least` and nearly all the times grew by."""
    parts = np.array_split(times, min(FINE_PARTS, len(times) // LEAST_IN_PART))
    levels = np.array([float(np.quantile(part, USUAL_QUANTILE)) for part in parts])
    quarter = len(levels) // DRIFT_PARTS
    growth = float(levels[-quarter:].mean() - levels[:quarter].mean())
    fall = float((np.maximum.accumulate(levels) - levels).max())
    return fall > max(FALLS_BACK * growth, least)


def _slowdowns(rest: Vector | None, usual: float) -> list[float]:
    """Returns how many times slower than at first the rest of the step was in each quarter, at least 1."""
    if rest is None or float(np.median(rest)) < MIN_REST * usual:
        return [1.0] * DRIFT_PARTS
    levels = [float(np.quantile(part, USUAL_QUANTILE)) for part in np.array_split(rest, DRIFT_PARTS)]
    return [max(1.0, level / max(1.0, levels[0])) for level in levels]
