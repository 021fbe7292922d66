"""What is drawn of one rank, made again only where its steps have changed.

Of a thousand ranks few have been asked since the last time, and all are drawn together.

Legend: B is a bin, S one of the newest steps, W one of `WAITS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from diagnose.dashboards._bins import MAX_BINS, Bins
from diagnose.dashboards._series import GapParts, Rates, rates_of

from diagnose.analysis.gaps import phase_weights
from diagnose.analysis.lateness import WAITS
from diagnose.core.ledger import COUNTS
from diagnose.core.phases import Phase

ORDER = tuple(Phase)
COLUMNS_OF_WAITS = [ORDER.index(phase) for phase in WAITS]

Vector = npt.NDArray[np.float64]


class RankSeries:
    """The series of one rank, each kept until what it was made of is another."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Any, Any]] = {}

    def filled(self, bins: Bins) -> slice:
        """Returns the bins from the first to the last that has a step."""
        return self._known("filled", bins.changes, bins.filled)

    def rates_B(self, bins: Bins) -> Rates:
        """Returns what the rank does per second in each bin."""
        return self._known("rates", bins.changes, lambda: rates_of(bins.sums))

    def waits_BW(self, bins: Bins, factor: int, parts: GapParts) -> Vector:
        """Returns nanoseconds per step of each wait, `factor` bins made one; NaN where none was read."""
        key = (bins.changes, factor, parts)
        return self._known("waits", key, lambda: _waits_BW(bins, factor, parts))

    def recent_rates_S(self, num_steps: int, recent: npt.NDArray[np.int64]) -> Rates:
        """Returns what the rank does per second in each of its newest steps, up to `num_steps`."""
        return self._known("recent rates", num_steps, lambda: rates_of(recent))

    def recent_waits_2S(self, num_steps: int, recent: npt.NDArray[np.int64], parts: GapParts) -> Vector:
        """Returns how long the rank waits in each of its newest steps, and how long each takes, in ns."""
        key = (num_steps, parts)
        return self._known("recent waits", key, lambda: _recent_waits_2S(recent, parts))

    def _known(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            kept = self._kept[name] = (key, make())
        return kept[1]


def _waits_BW(bins: Bins, factor: int, parts: GapParts) -> Vector:
    begins = np.arange(0, MAX_BINS, factor)
    counts_B = np.add.reduceat(bins.counts, begins)
    weights = phase_weights(parts)[:, COLUMNS_OF_WAITS]
    sums = np.add.reduceat(bins.sums[:, len(COUNTS) :], begins) @ weights
    known = counts_B > 0
    waits_BW = np.full(sums.shape, np.nan)
    waits_BW[known] = sums[known] / counts_B[known, None]
    return waits_BW


def _recent_waits_2S(recent: npt.NDArray[np.int64], parts: GapParts) -> Vector:
    slots = recent[:, len(COUNTS) :].astype(float)
    return np.stack([slots @ phase_weights(parts)[:, COLUMNS_OF_WAITS].sum(axis=1), slots.sum(axis=1)])
