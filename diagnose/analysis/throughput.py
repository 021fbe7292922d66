"""How much work was done per second, and how sure that is, from one run."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from diagnose.analysis.steps import step_times
from diagnose.core.ledger import COLUMNS
from diagnose.core.profile import Throughput
from diagnose.core.units import NS_PER_S

NUM_BLOCKS = 20
"""Steps near each other are alike, so blocks of them are compared, not steps."""

T_95 = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 19: 2.09}
"""Two-sided 95 % points of Student's t by degrees of freedom."""

MIN_BLOCKS = 4


def throughput_of(rows: npt.NDArray[np.int64], samples_per_s: float, tokens_per_s: float) -> Throughput:
    """Returns what all ranks together do.

    Args:
        rows: Measured steps of the first rank, which stands for all in how sure the figure is.
        samples_per_s: Of all ranks together, 0 when no batch size could be read.
        tokens_per_s: Likewise.
    """
    if not len(rows):
        return Throughput()
    times = step_times(rows)
    interval = None
    if samples_per_s:
        low, high = interval_95(rows[:, COLUMNS.index("samples")], times)
        own = rate(rows, "samples")
        if own and math.isfinite(high):
            interval = (samples_per_s * low / own, samples_per_s * high / own)
    return Throughput(
        samples_per_s=samples_per_s or None,
        samples_per_s_ci95=interval,
        tokens_per_s=tokens_per_s or None,
        steps_per_s=len(times) * NS_PER_S / float(times.sum()),
    )


def rate(rows: npt.NDArray[np.int64], column: str) -> float:
    """Returns how much of a column's count one rank did per second; 0 without steps."""
    total_ns = float(step_times(rows).sum())
    return float(rows[:, COLUMNS.index(column)].sum()) * NS_PER_S / total_ns if total_ns else 0.0


def interval_95(samples: npt.NDArray[np.int64], times_ns: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Returns a 95 % interval of samples per second, by the method of batch means.

    It covers the noise within this run. Another run on another day may lie outside.

    Args:
        samples: Samples of each step, shape `(steps,)`.
        times_ns: Wall time of each step, shape `(steps,)`.
    """
    total_ns = float(times_ns.sum())
    rate = float(samples.sum()) * NS_PER_S / total_ns
    blocks = min(NUM_BLOCKS, len(times_ns) // 2)
    if blocks < MIN_BLOCKS:
        return (0.0, math.inf)
    rates = [
        float(part.sum()) * NS_PER_S / float(time.sum())
        for part, time in zip(
            np.array_split(samples, blocks), np.array_split(times_ns, blocks), strict=True
        )
    ]
    if min(rates) <= 0:
        return (0.0, math.inf)
    # Of logarithms, so that a noisy run does not reach down to zero.
    free = max(key for key in T_95 if key <= blocks - 1)
    factor = math.exp(T_95[free] * float(np.log(rates).std(ddof=1)) / math.sqrt(blocks))
    return rate / factor, rate * factor
