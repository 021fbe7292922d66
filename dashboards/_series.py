"""Bins of the ledger's slots to series of phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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

SAMPLES, TOKENS = COLUMNS.index("samples"), COLUMNS.index("tokens")
ORDER = tuple(Phase)


def steps_of(ranks: Sequence[Bins], parts: GapParts, begun_ns: int) -> Steps:
    """Returns the first rank's bins as series, with the throughput of all ranks.

    Args:
        ranks: One each, the first rank's first; all begin and are as wide alike.
        parts: Of the first rank.
        begun_ns: When its first step ended.
    """
    bins = ranks[0]
    used = bins.filled()
    counts = bins.counts[used]
    if not len(counts):
        return Steps(width=bins.width)
    each = _each(counts)
    sums = bins.sums[used]
    slots_ns = sums[:, len(COUNTS) :].astype(float)
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
        longest_ms=np.where(counts > 0, bins.longest_ns[used] / NS_PER_MS, np.nan),
        phase_ms=phase_ms,
        samples_per_s=_rate(ranks, used, SAMPLES),
        tokens_per_s=_rate(ranks, used, TOKENS),
        end_s=np.where(counts > 0, (sums[:, 0] - begun_ns) / NS_PER_S, np.nan),
    )


def _each(counts: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Returns one part by the number of steps; NaN where there are none."""
    known = counts.astype(float)
    return np.divide(1.0, known, out=np.full(known.shape, np.nan), where=known > 0)


def _rate(ranks: Sequence[Bins], used: slice, column: int) -> npt.NDArray[np.float64]:
    """Returns what all ranks together do per second; NaN in bins that tell nothing of it."""
    total = np.zeros(used.stop - used.start)
    for bins in ranks:
        time_ns = bins.sums[used, len(COUNTS) :].sum(axis=1).astype(float)
        own = np.divide(bins.sums[used, column], time_ns, out=np.zeros(len(total)), where=time_ns > 0)
        total += own * NS_PER_S
    known = (ranks[0].counts[used] > 0) & (total > 0)
    return np.where(known, total, np.nan)
