"""Which rank the others wait for, bin by bin: the report's own measure of lateness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import Bins
from diagnose.dashboards._series import GapParts
from diagnose.dashboards._snapshot import Lateness, LateNow, RankBins
from diagnose.dashboards._tailing import RankTail
from diagnose.dashboards._waits import MAX_RANK_BINS, NEWEST_STEPS, LateBins

from diagnose.analysis.gaps import phase_weights
from diagnose.analysis.lateness import WAITS, behind, latest
from diagnose.analysis.meetings import MIN_STEPS
from diagnose.core.ledger import COUNTS
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS

ORDER = tuple(Phase)
COLUMNS_OF_WAITS = [ORDER.index(phase) for phase in WAITS]
COMMUNICATION = WAITS.index(Phase.COMMUNICATION)


def lateness_of(
    tails: Sequence[RankTail], parts: Sequence[GapParts], met: LateBins | None
) -> Lateness | None:
    """Returns how ranks differ; `None` where fewer than two have steps.

    Args:
        tails: The ranks; their bins begin and are as wide alike.
        parts: How the gaps of each divide.
        met: What they wait for each other, where that is measured in each step.
    """
    filled = [tail.bins.filled() for tail in tails]
    if sum(used.stop > used.start for used in filled) < 2:
        return None
    if met is not None and met.num_met < MIN_STEPS:
        met = None  # as in the report: so few tell nothing
    ranks = tuple(tail.number for tail in tails)
    first, width, waits_RBW = _waits([tail.bins for tail in tails], parts, filled)
    communication = RankBins(first=first, width=width, values_ms=waits_RBW[:, :, COMMUNICATION] / NS_PER_MS)
    if met is not None:
        late = RankBins(first=0, width=met.width, values_ms=met.per_step_ns() / NS_PER_MS)
    else:
        late = RankBins(first=first, width=width, values_ms=behind(waits_RBW.sum(axis=2)) / NS_PER_MS)
    return Lateness(
        ranks=ranks,
        late=late,
        communication=communication,
        by_meetings=met is not None,
        now=_now(tails, parts, met),
    )


def _waits(
    ranks: Sequence[Bins], parts: Sequence[GapParts], filled: Sequence[slice]
) -> tuple[int, int, npt.NDArray[np.float64]]:
    """Returns where the first bin begins, how wide bins are, and nanoseconds per step of each wait."""
    first = min(used.start for used in filled if used.stop)
    last = max(used.stop for used in filled)
    start, width = ranks[0].start // ranks[0].width + first, ranks[0].width
    factor = 1
    while _bins_of(start, last - first, factor) > MAX_RANK_BINS:
        factor *= 2
    which = (np.arange(start, start + last - first) // factor) - start // factor
    begins = np.flatnonzero(np.diff(which, prepend=-1))
    waits_RBW = np.full((len(ranks), len(begins), len(WAITS)), np.nan)
    for index, (bins, own) in enumerate(zip(ranks, parts, strict=True)):
        counts_B = np.add.reduceat(bins.counts[first:last], begins)
        weights = phase_weights(own)[:, COLUMNS_OF_WAITS]
        sums = np.add.reduceat(bins.sums[first:last, len(COUNTS) :], begins) @ weights
        known = counts_B > 0
        waits_RBW[index, known] = sums[known] / counts_B[known, None]
    return start // factor * factor * width, width * factor, waits_RBW


def _now(tails: Sequence[RankTail], parts: Sequence[GapParts], met: LateBins | None) -> LateNow | None:
    """Returns which rank is late in the newest steps that all have told of; `None` where none is."""
    end = min(tail.num_steps for tail in tails)
    begin = max(end - NEWEST_STEPS, *(tail.num_steps - len(tail.recent) for tail in tails))
    if begin >= end:
        return None
    slots_R = []
    for tail in tails:
        rows_from = tail.num_steps - len(tail.recent)
        slots_R.append(tail.recent[begin - rows_from : end - rows_from, len(COUNTS) :].mean(axis=0))
    if met is not None:
        late_R = met.newest_ns()
    else:
        waits = [
            float(slots @ phase_weights(own)[:, COLUMNS_OF_WAITS].sum(axis=1))
            for slots, own in zip(slots_R, parts, strict=True)
        ]
        late_R = behind(np.array(waits))
    place = latest(late_R.tolist(), [float(slots.sum()) for slots in slots_R])
    if place is None:
        return None
    return LateNow(rank=tails[place].number, late_ns=float(late_R[place]), num_steps=end - begin)


def _bins_of(start: int, count: int, factor: int) -> int:
    return (start + count - 1) // factor - start // factor + 1
