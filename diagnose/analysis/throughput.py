"""How sure a rate is, from one run."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from diagnose.core.units import NS_PER_S

NUM_BLOCKS = 20
"""Steps near each other are alike, so blocks of them are compared, not steps."""

T_95 = {3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 8: 2.31, 10: 2.23, 15: 2.13, 19: 2.09}
"""Two-sided 95 % points of Student's t by degrees of freedom."""

MIN_BLOCKS = 4


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
