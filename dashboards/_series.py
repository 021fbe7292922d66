"""Bins of the ledger's slots to series of phases."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import Bins
from diagnose.dashboards._snapshot import Steps

from diagnose.analysis.gaps import phase_weights
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS, NS_PER_S

GapParts = Mapping[int, Mapping[Phase, float]]
"""For each gap slot, the part of it that each phase has, as the sampled lines tell."""

Rates = npt.NDArray[np.float64]
"""Samples per second, of each bin or step."""

SAMPLES = COLUMNS.index("samples")
ORDER = tuple(Phase)


def steps_of(bins: Bins, rates: Rates, parts: GapParts) -> Steps:
    """Returns the first rank's bins as series, with the throughput of all ranks.

    Args:
        bins: Of the first rank.
        rates: Of all ranks together, in each of its bins; 0 where they are not known.
        parts: How the first rank's gaps divide.
    """
    used = bins.filled()
    counts = bins.counts[used]
    if not len(counts):
        return Steps(width=bins.width)
    each = _each(counts)
    slots_ns = bins.sums[used, len(COUNTS) :].astype(float)
    phases_ms = slots_ns @ phase_weights(parts) * each[:, None] / NS_PER_MS
    phase_ms = {
        phase: phases_ms[:, index]
        for index, phase in enumerate(ORDER)
        if np.nansum(phases_ms[:, index]) > 0
    }
    return Steps(
        first=bins.start + used.start * bins.width,
        width=bins.width,
        counts=counts.copy(),
        step_ms=slots_ns.sum(axis=1) * each / NS_PER_MS,
        phase_ms=phase_ms,
        samples_per_s=np.where((counts > 0) & (rates[used] > 0), rates[used], np.nan),
    )


def rates_of(sums: npt.NDArray[np.int64]) -> Rates:
    """Returns what one rank does in each bin or step; 0 where nothing took any time."""
    time_ns = sums[:, len(COUNTS) :].sum(axis=1).astype(float)
    done = sums[:, SAMPLES] * float(NS_PER_S)
    return np.divide(done, time_ns, out=np.zeros_like(done), where=time_ns > 0)


def _each(counts: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Returns one part by the number of steps; NaN where there are none."""
    known = counts.astype(float)
    return np.divide(1.0, known, out=np.full(known.shape, np.nan), where=known > 0)
