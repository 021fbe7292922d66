"""The steps of one run to one figure: where the warm-up ends, and what a usual step costs after it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.analysis.compare import StepSeries
from diagnose.core.phases import Phase

Vector = npt.NDArray[np.float64]

MIN_WARMUP = 20
"""Steps always left out: allocators, caches and clocks settle in them even where no step stands out."""

MIN_STEPS = 20
"""Fewer measured steps make no figure of a run."""

LONGEST = 0.05
"""Part of the steps, the longest, that count only as much as the shortest of them.

A rare stall then moves the figure hardly more than it moves the median of all steps. The median itself is
blind to what one step in four bears, and a loader with four workers delivers just so: three steps find
their batch ready, the fourth waits. Up to 16 workers, its long steps are more than these."""

WARMUP_BATCH = 5
"""Steps that the search for the end of the warm-up moves by."""

MAX_WARMUP_SHARE = 0.5

BEYOND = 2.0
"""What is cut off must differ from the rest by so many of its standard errors to count as warm-up."""


def find_warmup(times: Vector, compiled: npt.NDArray[np.bool_]) -> int:
    """Returns how many leading steps are not yet like the others.

    The cut that leaves the mean of what follows most certain (the marginal standard error rule of
    simulation studies), on logarithms, so that a single long step does not attract it; and never before
    the last step of the first half that compiled something.

    Args:
        times: Nanoseconds of each step, shape `(N,)`.
        compiled: Whether the step compiled something, shape `(N,)`.
    """
    half = int(len(times) * MAX_WARMUP_SHARE)
    if half < WARMUP_BATCH:
        return min(1, len(times))
    num_batches = len(times) // WARMUP_BATCH
    batches = np.log(np.maximum(times[: num_batches * WARMUP_BATCH], 1)).reshape(num_batches, WARMUP_BATCH)
    levels = np.median(batches, axis=1)
    cuts = np.arange(half // WARMUP_BATCH + 1)
    cuts = cuts[cuts < num_batches - 1]
    errors = [float(np.var(levels[cut:]) / (num_batches - cut)) for cut in cuts]
    best = int(cuts[int(np.argmin(errors))]) if len(cuts) else 0
    found = best * WARMUP_BATCH if _stands_out(levels, best) else 0
    compiling = np.flatnonzero(compiled[:half])
    return max(1, found, int(compiling[-1]) + 1 if len(compiling) else 0)


def _stands_out(levels: Vector, cut: int) -> bool:
    if cut == 0:
        return False
    rest = levels[cut:]
    spread = float(np.std(rest)) or 1e-9
    return bool(abs(np.mean(levels[:cut]) - np.mean(rest)) > BEYOND * spread / np.sqrt(min(cut, len(rest))))


def usual_cost(costs: Vector) -> Vector:
    """Returns the mean cost of a step, in which the longest steps are cut down to the 95th percentile.

    Measured on simulated runs (`benchmarks/gate_simulation.py`): as steady as the median from run to run,
    within a twentieth, and like the mean it sees costs that only some steps bear.

    Args:
        costs: Time per sample, or per step, of each measured step: shape `(..., N)`.

    Returns:
        Shape `(...)`.
    """
    most = np.quantile(costs, 1 - LONGEST, axis=-1, keepdims=True)
    mean: Vector = np.minimum(costs, most).mean(axis=-1)
    return mean


def usual_phases(series: StepSeries) -> dict[Phase, float]:
    """Returns the nanoseconds that each phase usually takes; nothing of a run of too few steps."""
    if len(series) < MIN_STEPS:
        return {}
    times = series.phase_time_ns.items()
    return {phase: float(usual_cost(np.asarray(time_N, float))) for phase, time_N in times}
