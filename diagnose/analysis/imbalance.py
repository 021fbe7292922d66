"""How evenly the ranks' work is divided, step by step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from diagnose.analysis.across import UNITS, Across
from diagnose.core.parallel import Imbalance

Vector = npt.NDArray[np.float64]

STEEPEST = 2.5
"""A batch that is a hundredth larger makes its forward pass a hundredth longer where that is linear, and
two where attention takes all of it. More is not the size's doing."""

MIN_STEPS = 20
"""Steps that all ranks must have made: fewer carry no line."""


def imbalance_of(across: Across, ranks: Mapping[int, int]) -> Imbalance | None:
    """Compares the ranks' batches of the same step; `None` with one rank, or where sizes are not known.

    Args:
        across: The ranks' steps side by side.
        ranks: The number of each rank by its place among them. Two processes of one rank are no two ranks.
    """
    count = len(ranks)
    if count < 2 or len(set(ranks.values())) < count or across.steps < MIN_STEPS:
        return None
    places = sorted(ranks)
    points = [across.points[place] for place in places]
    within = [each.step_N < across.steps for each in points]
    forward_N = np.concatenate([p.forward_N[w] for p, w in zip(points, within, strict=True)])
    for unit in UNITS:
        sizes = across.sizes[unit]
        if not (sizes.least_S > 0).all():
            continue
        size_N = np.concatenate([p.size_N[unit][w] for p, w in zip(points, within, strict=True)])
        fit = _line(size_N, forward_N)
        if fit is None:
            continue  # every batch is alike in this unit
        slope, correlation = fit
        if slope * float(size_N.mean()) > STEEPEST * float(forward_N.mean()):
            continue  # a rank that is slower for another reason, and has a little more
        mean_S = sizes.total_S / count
        fullest = sizes.fullest.counts(max(places) + 1) / across.steps
        return Imbalance(
            unit=unit,
            spread=float((sizes.fullest.most_S - mean_S).mean()),
            mean=float(sizes.total_S.sum() / (count * across.steps)),
            forward_ns_per_unit=slope,
            correlation=correlation,
            fullest={ranks[place]: float(fullest[place]) for place in places},
        )
    return None


def _line(x_N: Vector, y_N: Vector) -> tuple[float, float] | None:
    """Returns slope and correlation of a line through points, of which the highest are cut off."""
    if np.ptp(x_N) == 0:
        return None
    y_N = np.minimum(y_N, np.percentile(y_N, 98))  # a pause of the machine is no work
    slope = float(np.polyfit(x_N, y_N, 1)[0])
    spread = float(np.std(y_N))
    return slope, max(0.0, slope * float(np.std(x_N)) / spread) if spread else 0.0
