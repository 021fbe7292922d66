"""Tells when the training loss goes up more than it ever did by itself.

Losses fall, scatter, depend on the one before, jump at single batches and between epochs. So a block of
steps is compared with a moving average of the blocks before it, in units of what blocks have scattered
around it so far, and what they lie too high is added up until it is too much (a one-sided CUSUM).
`benchmarks/loss_alarms.py` prints how often that errs.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from diagnose.core.units import MAD_TO_SIGMA

BLOCK_STEPS = 10
"""Single steps scatter with heavy tails and hang together; means of so many do less."""

BASELINE_BLOCKS = 12
"""Before so many blocks nobody knows how far they scatter."""

REMEMBERED_BLOCKS = 100
"""The scatter is that of the latest blocks: it grows and shrinks in the course of training."""

PULL = 0.1
"""Part of the way that the average goes towards each block: a loss that stays at its new level for some
hundred steps is what this training does now."""

SLACK = 1.0
"""A block that lies higher by less than this many standard deviations is no sign of anything."""

LARGEST = 4.0
"""A block counts as so many at most: one batch with a loss a hundred times the usual is no divergence."""

ALARM = 12.0
"""In simulated runs of 3000 steps without a fault the sum came to 3 to 7 in one of twenty, by kind of loss,
and once to 11."""

OWN_FAULTS = 10
"""Where the script has had losses that are no numbers before, so many in a row mean something."""


class LossAlarm(Exception):
    """The loss is no number, or rose more than it does by itself; the message says which.

    Args:
        reason: In words for the user.
        fatal: Whether it is no number.
    """

    def __init__(self, reason: str, fatal: bool) -> None:
        super().__init__(reason)
        self.fatal = fatal


class LossTrend:
    """One series of losses.

    Attributes:
        alarm: What is wrong, in words; empty while nothing is.
        fatal: Whether the loss is no number any more.
        paused: Whether losses mean nothing for now; until `restart`.
    """

    def __init__(self) -> None:
        self.alarm = ""
        self.fatal = False
        self.paused = False
        self._had_faults = False
        self._above: deque[float] = deque(maxlen=REMEMBERED_BLOCKS)
        self.restart()

    def restart(self) -> None:
        """Takes the level that comes now for the usual one; how far losses scatter stays known."""
        self.alarm, self.fatal, self.paused = "", False, False
        self._block: list[float] = []
        self._level: float | None = None
        self._sum = self._before = 0.0
        self._num_faults = 0

    def add(self, loss: float) -> None:
        """Takes the loss of the next step."""
        if self.paused:
            return
        if not math.isfinite(loss):
            self._num_faults += 1
            if self._num_faults >= (OWN_FAULTS if self._had_faults else 1):
                self.alarm, self.fatal = f"the loss is {loss}", True
            return
        self._num_faults = 0
        self._block.append(loss)
        if len(self._block) == BLOCK_STEPS:
            self._end_block(statistics.fmean(self._block))
            self._block.clear()

    def fault_is_own(self) -> None:
        """The latest fault came without any change in force: the script has such losses by itself."""
        self._had_faults = True

    def _end_block(self, mean: float) -> None:
        if self._level is None:
            self._level = mean
            return
        above = mean - self._level
        if len(self._above) >= BASELINE_BLOCKS:
            usual = statistics.median(self._above)
            spread = MAD_TO_SIGMA * statistics.median(abs(each - usual) for each in self._above)
            # A loss that does not move at all, to the last bit, still rounds.
            spread = max(spread, 1e-6 * abs(self._level))
            # Where the loss falls, blocks usually lie below: that it falls no more is no alarm.
            high = (above - max(usual, 0.0)) / spread if spread else 0.0
            if not self._sum:
                self._before = self._level
            self._sum = max(0.0, self._sum + min(high, LARGEST) - SLACK)
            if self._sum > ALARM and not self.alarm:
                self.alarm = f"the loss rose to {mean:.4g}, from {self._before:.4g} on average before"
        self._level += PULL * above
        self._above.append(above)
