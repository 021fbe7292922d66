"""Which rank the others wait for over the measured steps: the report's measure of lateness, bin by bin.

Legend: S is a step that all ranks made, R a rank, B a bin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from diagnose.analysis.lateness import WAITS, behind
from diagnose.analysis.meetings import Vector, Waits
from diagnose.core.history import LateRanks
from diagnose.core.phases import Phase

MAX_BINS = 64
"""Columns of a map of ranks: with as many rows more are neither seen nor kept for a thousand ranks."""


def bin_width(num_steps: int, most: int = MAX_BINS) -> int:
    """Returns how many steps are one bin, a power of two, if there are to be so many bins at most."""
    width = 1
    while num_steps > width * most:
        width *= 2
    return width


def waits_in_bins(series: Mapping[Phase, Vector], width: int) -> tuple[float, ...]:
    """Returns what a rank waits in each bin, in nanoseconds per step.

    Args:
        series: Nanoseconds of each phase by measured step.
        width: Steps per bin.
    """
    waits_S = np.sum([series[phase] for phase in WAITS if phase in series], axis=0)
    if not np.ndim(waits_S) or not len(waits_S):
        return ()
    begins = np.arange(0, len(waits_S), width)
    counts_B = np.diff(np.append(begins, len(waits_S)))
    return tuple((np.add.reduceat(waits_S, begins) / counts_B).tolist())


def late_ranks(
    numbers: Sequence[int],
    waits: Sequence[tuple[float, ...]],
    met: Waits | None,
    first: int,
    width: int,
) -> LateRanks | None:
    """Returns how late each rank is in each bin; `None` with fewer than two.

    Args:
        numbers: Of the ranks, in order of their places.
        waits: What each of them waits in each bin.
        met: What they wait for gradients in the same steps, where that was measured; else a rank is late by
            as much as it waits less than the usual one.
        first: The first measured step.
        width: Steps per bin.
    """
    if len(numbers) < 2 or not any(waits):
        return None
    if met is not None:
        num_steps = len(met.met_S)
        begins = np.arange(0, num_steps, width)
        counts_B = np.diff(np.append(begins, num_steps))
        held_RB = met.held_ns(np.arange(num_steps) // width, len(begins))[sorted(met.mean)]
        late_RB = held_RB / counts_B
    else:
        waits_RB = np.full((len(waits), max(map(len, waits))), np.nan)
        for place, own in enumerate(waits):
            waits_RB[place, : len(own)] = own
        late_RB = behind(waits_RB)
    return LateRanks(
        ranks=tuple(numbers), first=first, width=width, late_ns=tuple(map(tuple, late_RB.tolist()))
    )
