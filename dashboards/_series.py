"""Bins of the ledger's slots to series of phases, and what sets the ranks apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import Bins
from diagnose.dashboards._snapshot import Lateness, Steps

from diagnose.analysis.gaps import phase_weights
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS, NS_PER_S

GapParts = Mapping[int, Mapping[Phase, float]]
"""For each gap slot, the part of it that each phase has, as the sampled lines tell."""

MAX_RANK_BINS = 128
"""Columns of the map of ranks: with 64 ranks more would neither be seen nor sent in time."""

STRAGGLER_DEVIATIONS = 4.0
"""The latest rank is a straggler where it is so many robust deviations later than the others."""

STRAGGLER_STEP_SHARE = 0.02
"""And by this part of the step at least: less nobody would look for."""

MAD_TO_SIGMA = 1.4826

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


def lateness_of(
    numbers: Sequence[int], ranks: Sequence[Bins], parts: Sequence[GapParts]
) -> Lateness | None:
    """Returns how ranks differ; `None` where fewer than two have steps.

    Args:
        numbers: The ranks' numbers.
        ranks: Their bins; all begin and are as wide alike.
        parts: Of each.
    """
    filled = [bins.filled() for bins in ranks]
    if sum(used.stop > used.start for used in filled) < 2:
        return None
    first = min(used.start for used in filled if used.stop)
    last = max(used.stop for used in filled)
    start, width = ranks[0].start // ranks[0].width + first, ranks[0].width
    factor = 1
    while _bins_of(start, last - first, factor) > MAX_RANK_BINS:
        factor *= 2
    which = (np.arange(start, start + last - first) // factor) - start // factor
    num_bins = int(which[-1]) + 1
    counts_RB = np.zeros((len(ranks), num_bins))
    phases_RBP = np.zeros((len(ranks), num_bins, len(ORDER)))
    for index, (bins, own) in enumerate(zip(ranks, parts, strict=True)):
        np.add.at(counts_RB[index], which, bins.counts[first:last])
        phases = bins.sums[first:last, len(COUNTS) :].astype(float) @ phase_weights(own)
        np.add.at(phases_RBP[index], which, phases)
    phases_RBP *= _each(counts_RB)[:, :, None] / NS_PER_MS
    communication_RB = phases_RBP[:, :, ORDER.index(Phase.COMMUNICATION)]
    work_RB = phases_RBP.sum(axis=2) - communication_RB
    late_RB = work_RB - _median(work_RB)
    straggler, late_ms, cause = _straggler(work_RB, phases_RBP, counts_RB)
    return Lateness(
        ranks=tuple(numbers),
        first=start // factor * factor * width,
        width=width * factor,
        late_ms=late_RB,
        communication_ms=communication_RB,
        straggler=None if straggler is None else numbers[straggler],
        straggler_ms=late_ms,
        cause=cause,
    )


def _straggler(
    work_RB: npt.NDArray[np.float64],
    phases_RBP: npt.NDArray[np.float64],
    counts_RB: npt.NDArray[np.float64],
) -> tuple[int | None, float, Phase | None]:
    """Returns the index of the rank that holds the others up, by how many ms per step, and its phase."""
    total_R = counts_RB.sum(axis=1)
    seen = total_R > 0
    if seen.sum() < 2:
        return None, 0.0, None
    # A mean over the bins, each weighed by its steps.
    work_R = np.nansum(work_RB * counts_RB, axis=1) / np.maximum(total_R, 1)
    phases_RP = np.nansum(phases_RBP * counts_RB[:, :, None], axis=1) / np.maximum(total_R, 1)[:, None]
    latest = int(np.argmax(np.where(seen, work_R, -np.inf)))
    others = seen & (np.arange(len(work_R)) != latest)
    usual = float(np.median(work_R[others]))
    spread = float(np.median(np.abs(work_R[others] - usual))) * MAD_TO_SIGMA
    late_ms = float(work_R[latest]) - usual
    step_ms = float(phases_RP[latest].sum())
    if late_ms <= max(STRAGGLER_DEVIATIONS * spread, STRAGGLER_STEP_SHARE * step_ms):
        return None, 0.0, None
    excess_P = phases_RP[latest] - np.median(phases_RP[others], axis=0)
    excess_P[ORDER.index(Phase.COMMUNICATION)] = -np.inf
    return latest, late_ms, ORDER[int(np.argmax(excess_P))]


def _bins_of(start: int, count: int, factor: int) -> int:
    return (start + count - 1) // factor - start // factor + 1


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


def _median(values_RB: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the median rank of each bin, of an even number the quicker of the two in the middle: of two
    ranks one is late and the other is not. NaN, without a warning, where no rank has steps."""
    seen = ~np.isnan(values_RB).all(axis=0)
    medians = np.full(values_RB.shape[1], np.nan)
    medians[seen] = np.nanquantile(values_RB[:, seen], 0.5, axis=0, method="lower")
    return medians
