"""Which part of what the sampler saw passed in a few long steps that come at no regular interval."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from diagnose.analysis.series import find_period, find_spikes
from diagnose.core.ledger import COUNTS
from diagnose.core.places import begins_ns


class LongSteps:
    """Answers for a moment of a slot how much of the time there is of such steps.

    The place of a sample says how much time its slot had had in that step. What is behind the usual end of
    the slot can only be of steps in which it took longer, and of how many of them is known exactly.

    Args:
        rows: The measured steps of one rank.
        by_device: Whether they are by the clock of a device: the places are the host's, and tell nothing.
    """

    def __init__(self, rows: npt.NDArray[np.int64], *, by_device: bool) -> None:
        self._times = np.zeros((0, 0)) if by_device else rows[:, len(COUNTS) :].astype(float)
        self._step_ns = float(np.median(self._times.sum(axis=1))) if len(self._times) else 0.0
        self._slots: dict[int, tuple[float, npt.NDArray[np.float64], npt.NDArray[np.bool_]] | None] = {}

    def part(self, slot: int, place: int) -> float:
        """Returns the part, 0 to 1, of the time at a place that passes in long steps, beyond what the slot
        usually takes; 0 where they are none, or come regularly."""
        if not place or not len(self._times):
            return 0.0
        if slot not in self._slots:
            self._slots[slot] = self._long(slot)
        found = self._slots[slot]
        if found is None:
            return 0.0
        usual_ns, times, spikes = found
        begin_ns = begins_ns(place)
        if begin_ns < usual_ns:
            return 0.0
        there = times > begin_ns
        return float(spikes[there].mean()) if there.any() else 0.0

    def _long(self, slot: int) -> tuple[float, npt.NDArray[np.float64], npt.NDArray[np.bool_]] | None:
        times = self._times[:, slot]
        usual_ns, spikes = find_spikes(times, self._step_ns)
        if not spikes.any() or find_period(np.flatnonzero(spikes)) is not None:
            return None
        return usual_ns, times, spikes
