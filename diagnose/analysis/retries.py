"""What it costs that the allocator asks the driver for memory again: from steps with and without."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from diagnose.core.ledger import COUNTS
from diagnose.store.reader import RankLog

MIN_INTERVALS = 5
"""With retries, and as many without: fewer tell no difference from chance."""

MIN_DEVIATIONS = 3.0
"""By so many of its own standard deviations must a retry's cost differ from nothing."""


def retry_ns(log: RankLog, warmup: int) -> float | None:
    """Returns the nanoseconds of a measured step that retries took.

    The allocator counts them and takes no time. Between two readings, half a second apart, there are more
    of them or fewer, and by so much longer as steps are where there are more, do they cost. Where every
    interval has its retries, there is nothing to compare them with.

    Returns:
        0 where there were none; `None` where that cannot be told.
    """
    slots = log.steps[:, len(COUNTS) :].sum(axis=1)
    ends = np.concatenate([[0], np.cumsum(slots)])
    rows: list[tuple[int, Mapping[str, Any]]] = [(step, readings) for _, step, readings in log.vitals]
    states = [
        (min(step, len(slots)), readings["allocator"]["retries"])
        for step, readings in rows
        if step >= warmup and "retries" in readings.get("allocator", {})
    ]
    if len(states) < 2:
        return None
    intervals = [
        (after - before, max(0, now - then), float(ends[after] - ends[before]))
        for (before, then), (after, now) in pairwise(states)
        if after > before
    ]
    if not intervals:
        return None
    steps, retries, times_ns = (np.array(column, dtype=float) for column in zip(*intervals, strict=True))
    if not retries.any():
        return 0.0
    if min((retries > 0).sum(), (retries == 0).sum()) < MIN_INTERVALS:
        return None
    per_step, step_ns = retries / steps, times_ns / steps
    usual = np.average(per_step, weights=steps)
    spread = per_step - usual
    slope = (steps * spread * step_ns).sum() / (steps * spread**2).sum()
    rest = step_ns - np.average(step_ns, weights=steps) - slope * spread
    deviation = np.sqrt((steps * rest**2).sum() / (len(steps) - 2) / (steps * spread**2).sum())
    return float(slope * usual) if slope > MIN_DEVIATIONS * deviation else None
