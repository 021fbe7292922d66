"""Is the second of two programs slower? Pairs of runs, one after the other, until they tell.

The run, not the step, is the unit. Steps of one run share the machine of that minute, the memory layout
and the neighbours; a test that takes them for independent finds a difference in a third of all pairs of
identical runs. Two runs right after each other share most of that, so what differs between them is the
program, and what scatters from pair to pair. Everything here works on the logarithm of the ratio of a
pair's costs, head over base: 0.05 is five percent more time for the same work.

What scatters has heavy tails (a backup starts, a neighbour arrives), so the estimate is a median of
averages (Hodges and Lehmann), and the test to stop early counts signs and ranks (Wilcoxon): neither
asks what the tails look like. `benchmarks/gate_simulation.py` prints how often the rule errs.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MIN_PAIRS = 7
"""With fewer, no order of pairs, however clear, is rarer than one in a hundred by chance."""

MAX_PAIRS = 20
"""Beyond, the scatter shrinks slower than the time to wait grows."""

LOOKS = (7, 10, 13, 16, 20)
"""Pairs after which the test may stop. Each further look is a further chance to err."""

LOOK_LEVEL = 0.01
"""How rare the pairs must be, were the change just what is allowed, for the test to stop early."""

LAST_LEVEL = 0.005
"""How rare the last pairs must be, were nothing changed at all, for a loss that is more than allowed to be
one: where pairs scatter as much as may be, what is allowed is only two standard errors above nothing."""

MAX_ERROR = 0.5
"""Standard error of the estimate, as a part of what is allowed, above which a change is not told from that.

No change is then two standard errors away from an alarm, whatever is allowed."""

CERTAIN = 4.0
"""So many standard errors beyond what is allowed a loss is a loss, however much the pairs scatter."""

HOPELESS = 2.0
"""The test gives up early where the error after the last pair would still be this many times too large."""

HOPELESS_FROM = 13
"""Pairs from which on it may. With fewer, one wild pair alone makes the interval wide."""

HUGE = math.log(2)
"""Each of a few pairs must be beyond what is allowed by this for them to tell: twice the time."""

FEW_PAIRS = 3
"""Pairs that can tell a huge loss, where no seven could be had.

Where one pair in ten is huge by chance, all of three are in one gate of a thousand.
`benchmarks/gate_simulation.py` prints how often on machines that it simulates."""

Z_975 = 1.96
"""Standard errors that half a 95 % interval is wide."""

Z_LAST = 2.576
"""Standard errors above nothing at which `LAST_LEVEL` is reached."""

Z_95 = 1.645
"""Quantile of the normal distribution: a loss this many errors beyond the limit is found in 95 of 100."""


class State(Enum):
    """What the pairs say so far."""

    PASS = "pass"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    GO_ON = "go on"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What some pairs say, in logarithms of cost ratios.

    Attributes:
        state: Whether they suffice, and for what.
        estimate: The change; above 0 the head costs more.
        low: Lower end of its 95 % interval; likewise `high`. Not a number with fewer than `MIN_PAIRS`
            pairs, which do not tell how they scatter.
        error: Standard error of the estimate; not a number likewise.
        p: How often pairs of identical programs would look this much slower.
        detectable: The change that as many such pairs find 95 times of 100; not a number likewise.
        pairs: Number of pairs.
    """

    state: State
    estimate: float
    low: float
    high: float
    error: float
    p: float
    detectable: float
    pairs: int


def decide(logs: Sequence[float], limit: float, *, last: bool = False) -> Decision:
    """Judges the pairs so far.

    Args:
        logs: Logarithm of head's cost over base's, of each pair in order; at least one.
        limit: The change that is still allowed, as such a logarithm.
        last: Whether no further pair can be had.
    """
    pairs = len(logs)
    estimate, error = hodges_lehmann(logs), standard_error(logs)
    low, high = interval_95(logs)
    if pairs < MIN_PAIRS:
        error = low = high = math.nan
    certain = error <= max_error(limit)
    least = max(limit, Z_LAST * error) if certain else limit + CERTAIN * error
    return Decision(
        state=_state(logs, limit, estimate, error, last=last or pairs >= MAX_PAIRS),
        estimate=estimate,
        low=low,
        high=high,
        error=error,
        p=chance_of_excess(logs),
        detectable=least + Z_95 * error,
        pairs=pairs,
    )


def max_error(limit: float) -> float:
    """Returns the standard error above which a change is not told from one that is allowed."""
    return MAX_ERROR * limit


def is_certain(estimate: float, error: float, limit: float) -> bool:
    """Whether a loss is one however much the pairs scatter; of too few of them that is not known."""
    return estimate > limit + CERTAIN * error


def _state(logs: Sequence[float], limit: float, estimate: float, error: float, *, last: bool) -> State:
    pairs = len(logs)
    beyond = [log - limit for log in logs]
    if pairs < MIN_PAIRS:
        if not last:
            return State.GO_ON
        is_huge = pairs >= FEW_PAIRS and min(beyond) > HUGE
        return State.REGRESSION if is_huge else State.INCONCLUSIVE
    if not last and pairs not in LOOKS:
        return State.GO_ON
    above = chance_of_excess(beyond) <= LOOK_LEVEL
    below = chance_of_excess([-value for value in beyond]) <= LOOK_LEVEL
    if error > max_error(limit):
        if above and is_certain(estimate, error, limit):
            return State.REGRESSION
        if below and estimate < limit - CERTAIN * error:
            return State.PASS
        at_the_end = error * math.sqrt(pairs / MAX_PAIRS)
        hopeless = pairs >= HOPELESS_FROM and at_the_end > HOPELESS * max_error(limit)
        return State.INCONCLUSIVE if last or hopeless else State.GO_ON
    if above or below:
        return State.REGRESSION if above else State.PASS
    if not last:
        return State.GO_ON
    if estimate <= limit:
        return State.PASS
    return State.REGRESSION if chance_of_excess(logs) <= LAST_LEVEL else State.INCONCLUSIVE


def hodges_lehmann(values: Sequence[float]) -> float:
    """Returns the median of the averages of all pairs of values, each value with itself included."""
    return statistics.median(_walsh_averages(values))


def standard_error(values: Sequence[float]) -> float:
    """Returns the standard error of the Hodges-Lehmann estimate, read off its interval.

    On heavy-tailed pairs it errs less than one from the median absolute deviation: of seven or ten values
    that is by chance far too small too often (half as many false alarms on a crowded machine).
    """
    low, high = interval_95(values)
    return (high - low) / (2 * Z_975)


def interval_95(values: Sequence[float]) -> tuple[float, float]:
    """Returns the signed-rank interval of the median: exact, whatever the tails, if they are symmetric.

    With five values or fewer no interval reaches 95 %; then it is the range of the values.
    """
    averages = sorted(_walsh_averages(values))
    counts = _rank_sum_counts(tuple(2 * rank for rank in range(1, len(values) + 1)))
    total, below, outside = 2 ** len(values), 0, 0
    for rank_sum in range(0, len(counts), 2):
        below += counts[rank_sum]
        if below > 0.025 * total:
            break
        outside += 1
    outside = max(0, outside - 1)
    return averages[outside], averages[-1 - outside]


def chance_of_excess(values: Sequence[float]) -> float:
    """Returns how often values that are as likely above 0 as below would lie this much above it.

    Wilcoxon's signed-rank test, one-sided, exact also with ties; zeros are left out.
    """
    nonzero = sorted((value for value in values if value), key=abs)
    doubled = _doubled_ranks([abs(value) for value in nonzero])
    positive = sum(rank for rank, value in zip(doubled, nonzero, strict=True) if value > 0)
    counts = _rank_sum_counts(tuple(doubled))
    return float(sum(counts[positive:]) / 2 ** len(nonzero))


def _walsh_averages(values: Sequence[float]) -> list[float]:
    return [(one + other) / 2 for index, one in enumerate(values) for other in values[index:]]


def _doubled_ranks(ordered: Sequence[float]) -> list[int]:
    """Returns twice the rank of each value: equal ones share the mean of theirs, twice that is whole."""
    doubled: list[int] = []
    while len(doubled) < len(ordered):
        first = len(doubled)
        ties = sum(1 for value in ordered[first:] if value == ordered[first])
        doubled += [2 * first + 1 + ties] * ties
    return doubled


@functools.cache
def _rank_sum_counts(doubled_ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Returns, for each sum, how many of all choices of some of the ranks add up to it."""
    counts = [1] + [0] * sum(doubled_ranks)
    for rank in doubled_ranks:
        for total in range(len(counts) - 1, rank - 1, -1):
            counts[total] += counts[total - rank]
    return tuple(counts)
