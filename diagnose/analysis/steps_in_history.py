"""Where a history of measurements changed its level for good."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from diagnose.core.units import MAD_TO_SIGMA

MIN_ENTRIES = 3
"""A level needs so many measurements: one or two may be a bad day of the machine."""

MIN_CHANGE = 0.03
"""A smaller change of level is none that a gate would stop, and noise of a quiet machine comes near it."""

MIN_DEVIATIONS = 3.0
"""And the change is so many robust standard deviations of a measurement from the one before it: a change
of level is one such difference among many, and does not pass for noise."""


def level_changes(values: Sequence[float]) -> list[int]:
    """Returns the indices at which a new level begins.

    Divides the history where that explains most of it, and then each part again, as long as the two levels
    differ by more than what scatters around them.

    Args:
        values: Positive measurements, oldest first.
    """
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) < 2 * MIN_ENTRIES:
        return []
    scatter = MAD_TO_SIGMA * float(np.median(np.abs(np.diff(logs)))) / math.sqrt(2)
    return _divide(logs, max(math.log1p(MIN_CHANGE), MIN_DEVIATIONS * scatter), 0)


def _divide(logs: npt.NDArray[np.float64], least: float, offset: int) -> list[int]:
    splits = range(MIN_ENTRIES, len(logs) - MIN_ENTRIES + 1)
    if not splits:
        return []
    split = min(splits, key=lambda at: _spread(logs[:at]) + _spread(logs[at:]))
    before, after = logs[:split], logs[split:]
    if abs(float(np.median(after) - np.median(before))) < least:
        return []
    return [*_divide(before, least, offset), offset + split, *_divide(after, least, offset + split)]


def _spread(logs: npt.NDArray[np.float64]) -> float:
    return float(np.abs(logs - np.median(logs)).sum())
