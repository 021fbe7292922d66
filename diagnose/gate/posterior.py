"""Which of a row of commits lost the speed, from measurements that err: a search by odds.

`git bisect` believes each answer. A measured answer is wrong now and then, and one wrong answer sends it
to the wrong half for good. Here every answer only shifts the odds of each commit; the next commit to
measure is the one whose answer is most open; and a commit may be measured again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diagnose.core.units import MAD_TO_SIGMA
from diagnose.gate.statistics import hodges_lehmann

COMMIT_SD = 0.004
"""Standard deviation between commits that no repetition averages away: another memory layout, another order
of imports. Four tenths of a percent is what builds of the same code differ by."""

MIN_SCATTER = 0.003
"""Pairs never scatter less than this, however alike the first few came out."""

TAILS = 3.0
"""Degrees of freedom of the t distribution that pairs scatter by: a neighbour's burst is no proof."""

MIN_GROUP = 3
"""Of two pairs, the middle is their mean, and both are equally far from it whatever they scatter by."""

APART = 4.0
"""So many standard errors from fast, and from slow, a commit is neither. At three, a simulated search for
one slow commit ended so now and then, and at four not once."""

PART_OF_LOSS = (0.3, 0.7)
"""A commit that has lost a part between these is as near to fast as to slow. Else the search goes on, and
names the commit that lost the larger part."""

EFFICIENCY = 1.1
"""Standard error of the Hodges-Lehmann estimate as a multiple of a mean's, on scatter of this kind."""


class CannotRun(Exception):
    """A commit whose training does not run: it can be the one, but it cannot be asked."""


class OutOfBudget(Exception):
    """No time is left for another pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Odds:
    """What is known of a row of commits after the good one.

    Attributes:
        of: Probability of each commit, in their order, to be the first slow one; they sum to 1.
        pairs: Logarithms of the cost over the good commit's, by index of the commit.
        skipped: Commits that do not run.
    """

    of: tuple[float, ...]
    pairs: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    skipped: frozenset[int] = frozenset()

    @property
    def num_pairs(self) -> int:
        """Pairs measured so far."""
        return sum(map(len, self.pairs.values()))

    def suspects(self) -> tuple[range, float]:
        """Returns the most likely commit, with those that cannot be told from it, and their odds together.

        A commit that does not run cannot be told from the next one that does.
        """
        groups = self._groups()
        best = max(groups, key=lambda group: sum(self.of[i] for i in group))
        return best, sum(self.of[i] for i in best)

    def _groups(self) -> list[range]:
        groups, start = [], 0
        for index in range(len(self.of)):
            if index not in self.skipped or index == len(self.of) - 1:
                groups.append(range(start, index + 1))
                start = index + 1
        return groups

    def most_open(self) -> int | None:
        """Returns the commit whose answer is closest to even odds; none where all that run are certain."""
        slow_by, so_far = [], 0.0
        for odds in self.of:
            so_far += odds
            slow_by.append(so_far)
        # The last commit is slow, whichever it was: there is nothing to ask it.
        asked = [index for index in range(len(self.of) - 1) if index not in self.skipped]
        return min(asked, key=lambda index: abs(slow_by[index] - 0.5), default=None)


def updated(odds: Odds, ends: Sequence[float]) -> tuple[float, ...]:
    """Returns the odds of each commit, given all pairs that were measured.

    Args:
        odds: The pairs; its own odds are not read.
        ends: Logarithms of the last commit's cost over the good one's, pair by pair.
    """
    drop = hodges_lehmann(ends)
    weight = {
        index: (_log_likelihood(middle / error), _log_likelihood((middle - drop) / error))
        for index, (middle, error) in _middles(odds, ends).items()
    }
    scores = [
        sum(slow if index >= first_slow else fast for index, (fast, slow) in weight.items())
        for first_slow in range(len(odds.of))
    ]
    top = max(scores)
    likely = [math.exp(score - top) for score in scores]
    return tuple(value / sum(likely) for value in likely)


def lost_in_parts(odds: Odds, ends: Sequence[float]) -> int | None:
    """Returns a commit that certainly lost a part of the speed, and but a part: there is more than one slow
    commit to find then, and more pairs do not tell which."""
    drop = hodges_lehmann(ends)
    for index, (middle, error) in _middles(odds, ends).items():
        is_known = len(odds.pairs[index]) >= MIN_GROUP and APART * error < middle < drop - APART * error
        if is_known and PART_OF_LOSS[0] * drop <= middle <= PART_OF_LOSS[1] * drop:
            return index
    return None


def _middles(odds: Odds, ends: Sequence[float]) -> dict[int, tuple[float, float]]:
    """Returns the estimate of each commit that was measured, with its standard error."""
    scatter = scatter_of((ends, *odds.pairs.values()))
    return {
        index: (
            hodges_lehmann(logs),
            math.hypot(EFFICIENCY * scatter / math.sqrt(len(logs)), COMMIT_SD),
        )
        for index, logs in odds.pairs.items()
    }


def _log_likelihood(errors: float) -> float:
    return -(TAILS + 1) / 2 * math.log1p(errors * errors / TAILS)


def search(
    num_commits: int,
    measure: Callable[[int], float],
    *,
    ends: Sequence[float],
    confidence: float,
    may_go_on: Callable[[Odds], bool] = lambda odds: True,
) -> Odds:
    """Measures commits until one is the first slow one with enough confidence.

    Args:
        num_commits: Commits after the good one, the last of which is slow.
        measure: Runs a pair of the good commit and the one of that index; returns the logarithm of their
            costs' ratio, or raises `CannotRun`, or `OutOfBudget`, which ends the search.
        ends: Logarithms of the last commit's cost over the good one's, pair by pair; the gate has found
            it slower.
        confidence: Odds at which to stop.
        may_go_on: Asked before each pair.

    Returns:
        The odds at the end: below `confidence` where `may_go_on` or the budget ended the search, or where
        more than one commit is slow.
    """
    odds = Odds(of=(1 / num_commits,) * num_commits)
    while odds.suspects()[1] < confidence and lost_in_parts(odds, ends) is None and may_go_on(odds):
        index = odds.most_open()
        if index is None:
            break
        try:
            log = measure(index)
        except CannotRun:
            odds = replace(odds, skipped=odds.skipped | {index})
            continue
        except OutOfBudget:
            break
        odds = replace(odds, pairs={**odds.pairs, index: (*odds.pairs.get(index, ()), log)})
        odds = replace(odds, of=updated(odds, ends))
    return odds


def scatter_of(groups: Iterable[Sequence[float]]) -> float:
    """Returns the standard deviation of one pair around its commit's own level, whatever a few of them did.

    Args:
        groups: The pairs of each commit. Those of which there are few lie closer to their own middle than
            to the level, and are spread accordingly.
    """
    residuals = sorted(
        abs(log - hodges_lehmann(logs)) * math.sqrt(len(logs) / (len(logs) - 1))
        for logs in groups
        if len(logs) >= MIN_GROUP
        for log in logs
    )
    return max(MIN_SCATTER, MAD_TO_SIGMA * statistics.median(residuals) if residuals else 0.0)
