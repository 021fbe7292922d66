"""Where a history of measurements changed its level for good."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MIN_ENTRIES = 3
"""A level needs so many measurements: one or two may be a bad day of the machine."""

MIN_CHANGE = 0.03
"""A smaller change of level is none that a gate would stop, and noise of a quiet machine comes near it."""

MIN_DEVIATIONS = 3.0
"""And the change is so many robust standard deviations of the measurements around their levels."""

MAD_TO_SIGMA = 1.4826


def level_changes(values: Sequence[float]) -> list[int]:
    """Returns the indices at which a new level begins.

    Divides the history where that explains most of it, and then each part again, as long as the two levels
    differ by more than what scatters around them.

    Args:
        values: Positive measurements, oldest first.
    """
    logs = np.log(np.asarray(values, dtype=float))
    return sorted(_divide(logs, 0))


def _divide(logs: npt.NDArray[np.float64], offset: int) -> list[int]:
    splits = range(MIN_ENTRIES, len(logs) - MIN_ENTRIES + 1)
    if not splits:
        return []
    split = min(splits, key=lambda at: _spread(logs[:at]) + _spread(logs[at:]))
    before, after = logs[:split], logs[split:]
    change = abs(float(np.median(after) - np.median(before)))
    rests = np.concatenate([before - np.median(before), after - np.median(after)])
    scatter = MAD_TO_SIGMA * float(np.median(np.abs(rests)))
    if change < max(np.log1p(MIN_CHANGE), MIN_DEVIATIONS * scatter):
        return []
    return [*_divide(before, offset), offset + split, *_divide(after, offset + split)]


def _spread(logs: npt.NDArray[np.float64]) -> float:
    return float(np.abs(logs - np.median(logs)).sum())
