"""Which part of what the sampler saw passed in a few long steps that come at no regular interval."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.analysis.series import find_period, find_spikes, without_neighbours
from diagnose.core.ledger import COUNTS
from diagnose.core.places import begins_ns

LEAST_EVENTS = 5
"""Fewer may be one thing that happened, such as the ends of two epochs; neighbouring long steps are one
event."""


class LongSteps:
    """Answers for a moment of a slot how much of the time there is of such steps.

    The place of a sample says how much time its slot had had in that step. What is behind the usual end of
    the slot can only be of steps in which it took longer, and of how many of them is known exactly.

    Args:
        rows: The measured steps of one rank.
        by_device: Whether they are by the clock of a device: the places are the host's, and tell nothing.
    """

    def __init__(self, rows: npt.NDArray[np.int64], *, by_device: bool) -> None:
        self._slots_ns = (rows[:0] if by_device else rows)[:, len(COUNTS) :]
        self._step_ns = float(np.median(self._slots_ns.sum(axis=1))) if len(self._slots_ns) else 0.0
        self._found: dict[int, tuple[float, npt.NDArray[np.float64], int] | None] = {}

    def part(self, slot: int, place: int) -> float:
        """Returns the part, 0 to 1, of the time at a place that passes in long steps, beyond what the slot
        usually takes; 0 where they are none, or come regularly."""
        if not place or not len(self._slots_ns):
            return 0.0
        if slot not in self._found:
            self._found[slot] = self._long(slot)
        found = self._found[slot]
        if found is None:
            return 0.0
        usual_ns, ascending, num_long = found
        begin_ns = begins_ns(place)
        if begin_ns < usual_ns:
            return 0.0
        num_there = len(ascending) - int(np.searchsorted(ascending, begin_ns, side="right"))
        return min(1.0, num_long / num_there) if num_there else 0.0

    def _long(self, slot: int) -> tuple[float, npt.NDArray[np.float64], int] | None:
        """Returns what a slot usually takes, its times in ascending order, and how many of the last of
        these are of long steps; `None` where those are no matter of chance."""
        times = self._slots_ns[:, slot].astype(float)
        usual_ns, spikes = find_spikes(times, self._step_ns)
        where = np.flatnonzero(spikes)
        if len(without_neighbours(where)) < LEAST_EVENTS or find_period(where) is not None:
            return None
        return usual_ns, np.sort(times), len(where)
