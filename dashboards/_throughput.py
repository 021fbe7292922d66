"""What all ranks together do per second, as far as each has told of its steps.

Of a thousand ranks those asked last know of more steps than those whose turn is to come. Steps that a rank
has not told of yet are taken to go as those of the others; steps that it will never tell of are not.

Legend: B is a bin, S a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import MAX_BINS, Bins
from diagnose.dashboards._device_steps import Seen
from diagnose.dashboards._series import Rates, rates_of
from diagnose.dashboards._tailing import RECENT_STEPS, RankTail

FAR_BEHIND = RECENT_STEPS // 2
"""A rank that was so many steps behind the first when it was asked is not waited for."""


class Together:
    """Adds ranks up.

    Args:
        size: Bins or steps.
    """

    def __init__(self, size: int) -> None:
        self._rates: Rates = np.zeros(size)
        self._told: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)
        self._missing: npt.NDArray[np.int64] = np.zeros(size, dtype=np.int64)

    def add(self, begin: int, rates: Rates) -> None:
        """Adds what a rank did from a bin on; where it is 0 the rank has told of no steps."""
        where = slice(begin, begin + len(rates))
        self._rates[where] += rates
        self._told[where] += rates > 0

    def miss(self, begin: int, end: int | None = None) -> None:
        """Counts a rank in bins in which it trains, but has not told of its steps."""
        self._missing[begin:end] += 1

    def rates(self) -> Rates:
        """Returns what all do; 0 in bins that tell nothing of it."""
        told = np.maximum(self._told, 1)
        return self._rates * (1 + self._missing / told)


def of_bins(ranks: Sequence[Bins]) -> Rates:
    """Returns what ranks do together in each bin, of which all is read; all are as wide alike."""
    together = Together(MAX_BINS)
    for bins in ranks:
        together.add(0, rates_of(bins.sums))
    return together.rates()


def overall(tails: Sequence[RankTail], first: Seen) -> Rates:
    """Returns what ranks do together in each bin.

    Args:
        tails: Their bins are as wide alike.
        first: The first rank's steps, by either clock.
    """
    together = Together(MAX_BINS)
    for tail in tails:
        width = tail.bins.width
        by_device = tail is tails[0] and first.device_share is not None
        rates = rates_of(first.bins.sums) if by_device else tail.series.rates_B(tail.bins)
        together.add(0, rates)
        together.miss(0, tail.unread_steps // width)
        if _is_awaited(tail, tails[0].num_steps):
            together.miss(-(-tail.num_steps // width))
    return together.rates()


def newest_end(tails: Sequence[RankTail], first: Seen) -> int:
    """Returns the end of the newest steps that the ranks asked at one time have all told of.

    Ranks flush at other moments: steps that some have not told of yet would show the rate of the others.
    """
    behind = [tail.behind_steps for tail in tails if tail.behind_steps < FAR_BEHIND]
    return max(0, min(first.num_steps, tails[0].num_steps - max(behind, default=0)))


def recent(tails: Sequence[RankTail], first: Seen, begin: int, end: int) -> Rates:
    """Returns what ranks do together in each step from `begin` to before `end`."""
    together = Together(end - begin)
    for tail in tails:
        if tail is tails[0] and first.device_share is not None:
            rates_S, told = rates_of(first.recent), first.num_steps
        else:
            rates_S, told = tail.series.recent_rates_S(tail.num_steps, tail.recent), tail.num_steps
        known = told - len(rates_S)
        together.add(max(0, known - begin), rates_S[max(0, begin - known) : max(0, end - known)])
        together.miss(0, min(max(0, known - begin), end - begin))
        if _is_awaited(tail, tails[0].num_steps) and tail.num_steps < end:
            together.miss(max(0, tail.num_steps - begin))
    return together.rates()


def _is_awaited(tail: RankTail, newest: int) -> bool:
    """Whether a rank trains, and has not been asked since the first rank told of its newest steps."""
    return tail.asked_at < newest and tail.behind_steps < FAR_BEHIND
