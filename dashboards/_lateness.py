"""Which rank the others wait for, bin by bin: the report's own measure of lateness."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from diagnose.dashboards._rank_series import Vector
from diagnose.dashboards._series import GapParts
from diagnose.dashboards._snapshot import Lateness, LateNow, RankBins
from diagnose.dashboards._tailing import RankTail
from diagnose.dashboards._waits import MAX_RANK_BINS, NEWEST_STEPS, LateBins

from diagnose.analysis.lateness import WAITS, behind, latest
from diagnose.analysis.meetings import MIN_STEPS
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS

COMMUNICATION = WAITS.index(Phase.COMMUNICATION)


def lateness_of(
    tails: Sequence[RankTail], parts: Sequence[GapParts], met: LateBins | None
) -> Lateness | None:
    """Returns how ranks differ; `None` where fewer than two have steps.

    Args:
        tails: The ranks; their bins begin at step 0 and are as wide alike.
        parts: How the gaps of each divide.
        met: What they wait for each other, where that is measured in each step.
    """
    filled = [tail.series.filled(tail.bins) for tail in tails]
    if sum(used.stop > used.start for used in filled) < 2:
        return None
    if met is not None and met.num_met < MIN_STEPS:
        met = None  # as in the report: so few tell nothing
    ranks = tuple(tail.number for tail in tails)
    first, width, waits_RBW = _waits(tails, parts, filled)
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
    tails: Sequence[RankTail], parts: Sequence[GapParts], filled: Sequence[slice]
) -> tuple[int, int, Vector]:
    """Returns where the first bin begins, how wide bins are, and nanoseconds per step of each wait."""
    first = min(used.start for used in filled if used.stop)
    last = max(used.stop for used in filled)
    factor = 1
    while (last - 1) // factor - first // factor + 1 > MAX_RANK_BINS:
        factor *= 2
    begin, end = first // factor, (last - 1) // factor + 1
    waits_RBW = np.stack(
        [
            tail.series.waits_BW(tail.bins, factor, own)[begin:end]
            for tail, own in zip(tails, parts, strict=True)
        ]
    )
    width = tails[0].bins.width * factor
    return begin * width, width, waits_RBW


def _now(tails: Sequence[RankTail], parts: Sequence[GapParts], met: LateBins | None) -> LateNow | None:
    """Returns which rank is late in the newest steps that all have told of; `None` where none is."""
    end = min(tail.num_steps for tail in tails)
    begin = max(end - NEWEST_STEPS, *(tail.num_steps - len(tail.recent) for tail in tails))
    if begin >= end:
        return None
    means_R2 = []
    for tail, own in zip(tails, parts, strict=True):
        waits_2S = tail.series.recent_waits_2S(tail.num_steps, tail.recent, own)
        rows_from = tail.num_steps - len(tail.recent)
        means_R2.append(waits_2S[:, begin - rows_from : end - rows_from].mean(axis=1))
    waits_R, times_R = np.array(means_R2).T
    late_R = met.newest_ns() if met is not None else behind(waits_R)
    place = latest(late_R.tolist(), times_R.tolist())
    if place is None:
        return None
    return LateNow(rank=tails[place].number, late_ns=float(late_R[place]), num_steps=end - begin)
