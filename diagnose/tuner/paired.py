"""Is a job faster with a change than without? Windows of steps in turn, and a test that may stop early.

Step times have a long memory: how busy the machine is, what the data are like. Tests for independent
samples therefore find differences that are not there, in half of all cases after some hundred steps.
Neighbouring windows of the two states share that memory, so their ratios are nearly independent of each
other, and a t interval on the logarithms of the ratios keeps its promise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from diagnose.core.trial import Measured

LEAST_GAIN = 0.01
"""A change that wins less is not worth being in force."""

LOOK_CONFIDENCE = 0.998
"""Of the interval at each look. The test looks after every pair from `MIN_PAIRS` on, so that a change
without effect is kept in 1 % of all trials at most, also where the machine's noise lasts longer than a pair
(`benchmarks/tuner_aa.py`): with 0.995 it was 2 % there."""

FUTILE_CONFIDENCE = 0.95
"""Of the interval by which a change is given up. A change that is kept by mistake stays to the end of the
run, one that is given up by mistake is a gain missed: the second takes less proof."""

CONFIRM_CONFIDENCE = 0.95
"""Of the interval that is printed for a measurement of a length set beforehand."""

MIN_PAIRS = 4
MAX_PAIRS = 16
MANY_PAIRS = 24
"""For changes of which little is expected."""

LITTLE = 1.10

HOPELESS = 0.5
"""After one pair, a change that makes steps take twice as long is not tried a second time."""

SPIKE = 4.0
"""A step that took this many times its window's median counts as so long: one pause must not decide."""

RARE = 0.05
"""Where more of a window's steps are so long, they are a part of what a step takes."""

LARGEST = math.log(1000.0)
"""A factor of more says no more: with two noisy pairs the ends of an interval lie beyond all numbers."""


class Verdict(Enum):
    """What a paired test came to."""

    FASTER = "faster"
    NOT_FASTER = "not faster"
    CANNOT_TELL = "cannot tell"


@dataclass(slots=True)
class PairedTest:
    """Collects pairs of windows until they tell.

    Attributes:
        max_pairs: Pairs after which it gives up.
        logs: Logarithm of each pair's ratio, time without over time with.
        without_ns: Mean step time of each window without the change; likewise `with_ns`.
        lost_ns: What the steps without the change took longer than as many with it.
        unseen_ns: What pauses too rare for windows add to a step without the change, less a standard error;
            the windows without it hold it already.
        error_ns: That standard error.
    """

    max_pairs: int = MAX_PAIRS
    logs: list[float] = field(default_factory=list)
    without_ns: list[float] = field(default_factory=list)
    with_ns: list[float] = field(default_factory=list)
    lost_ns: float = 0.0
    unseen_ns: float = 0.0
    error_ns: float = 0.0

    def add(self, without_ns: float, with_ns: float, steps: int = 0) -> None:
        """Adds a pair of neighbouring windows.

        Args:
            without_ns: Mean nanoseconds of a step in the window without the change; likewise `with_ns`.
            steps: How many were made without it, those that count in no window among them.
        """
        self.lost_ns += steps * max(0.0, without_ns - with_ns)
        self.logs.append(math.log(without_ns / with_ns))
        self.without_ns.append(without_ns)
        self.with_ns.append(with_ns)

    def verdict(self) -> Verdict | None:
        """Returns what the pairs say, or `None` while another one is needed."""
        if len(self.logs) < MIN_PAIRS:
            hopeless = self.logs and self.logs[0] < math.log(HOPELESS)
            return Verdict.NOT_FASTER if hopeless else None
        low, _ = interval(self.logs, LOOK_CONFIDENCE)
        least = math.log1p(LEAST_GAIN)
        if low > least:
            return Verdict.FASTER
        at_best = interval(self.logs, FUTILE_CONFIDENCE)[1]
        if at_best < least:
            return Verdict.NOT_FASTER
        return None if self._may_still_tell(at_best) else Verdict.CANNOT_TELL

    def _may_still_tell(self, at_best: float) -> bool:
        """Whether it would find a gain if all pairs that are left came out at `at_best` on average."""
        made, most = len(self.logs), self.max_pairs
        mean = (sum(self.logs) + (most - made) * at_best) / most
        half = t_point((1 + LOOK_CONFIDENCE) / 2, most - 1) * statistics.stdev(self.logs) / math.sqrt(most)
        return made < most and mean - half > math.log1p(LEAST_GAIN)

    def measured(self, confidence: float = LOOK_CONFIDENCE) -> Measured | None:
        """Returns what was measured; `None` with fewer than two pairs."""
        if len(self.logs) < 2:
            return None
        low, high = interval(self.logs, confidence)
        without_ns = statistics.fmean(self.without_ns)
        low += math.log1p(-min(self.error_ns, self.unseen_ns) / without_ns)
        high += math.log1p(3 * self.error_ns / without_ns)
        return Measured(
            speedup=_factor(statistics.fmean(self.logs)),
            low=_factor(low),
            high=_factor(high),
            pairs=len(self.logs),
            detectable=_factor(detectable(self.logs)),
            without_ns=without_ns,
            with_ns=statistics.fmean(self.with_ns),
        )


def against_untouched(measured: Measured, slowed: float) -> Measured:
    """Returns a measurement against the script's own steps.

    Args:
        measured: One against steps without a change that was prepared.
        slowed: How many times as long these took as untouched ones.
    """
    return replace(
        measured,
        speedup=measured.speedup / slowed,
        low=measured.low / slowed,
        high=measured.high / slowed,
        without_ns=measured.without_ns / slowed,
    )


def window_mean(times_ns: Sequence[float], whole: Collection[int] = ()) -> float:
    """Returns the mean step of a window, with rare spikes cut off at `SPIKE` times its median.

    Args:
        times_ns: Nanoseconds of each step.
        whole: Indices of steps that are expected to take long, and count as long as they took.
    """
    most = SPIKE * statistics.median(times_ns)
    long = sum(time > most for index, time in enumerate(times_ns) if index not in whole)
    if long > max(1, RARE * len(times_ns)):
        most = math.inf  # workers that began together deliver in bursts: the waits between are no pauses
    return statistics.fmean(
        time if index in whole else min(time, most) for index, time in enumerate(times_ns)
    )


def interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Returns the t interval of the mean of two or more values."""
    mean = statistics.fmean(values)
    half = t_point((1 + confidence) / 2, len(values) - 1) * _standard_error(values)
    return mean - half, mean + half


def detectable(values: Sequence[float]) -> float:
    """Returns the effect that so many pairs of such a spread find four times in five (power 0.8)."""
    degrees = len(values) - 1
    points = t_point((1 + LOOK_CONFIDENCE) / 2, degrees) + t_point(0.8, degrees)
    return math.log1p(LEAST_GAIN) + points * _standard_error(values)


def t_point(probability: float, degrees: int) -> float:
    """Returns the quantile of Student's t, for a probability above one half.

    By bisection of the distribution, which for whole degrees of freedom is a finite sum (Abramowitz and
    Stegun, 26.7.3 and 26.7.4).
    """
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        if (1 + _within(middle, degrees)) / 2 < probability:
            low = middle
        else:
            high = middle
    return high


def _within(t: float, degrees: int) -> float:
    """The probability that |T| is below `t`."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(odd + 1, degrees + (0 if odd else 1), 2):
        total += term
        term *= cosine * cosine * k / (k + 1)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def _factor(log: float) -> float:
    return math.exp(max(-LARGEST, min(LARGEST, log)))


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))
