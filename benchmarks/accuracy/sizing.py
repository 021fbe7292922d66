"""Finds the size at which a fault takes a wanted part of the step, on the machine at hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

ROUNDS = 6
"""Sizes that are tried for one severity, at most."""

TOLERANCE = 0.03
"""A size is found when the fault's true part of the step is so near; the cell may differ by noise."""

LEAST_ADDED = 0.003
"""A fault that seems to cost nothing is taken to cost this part of the step."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A size, and the part of the step that the fault then took."""

    size: float
    share: float

    @property
    def added(self) -> float:
        """What the fault adds to the step, as a part of the step without it."""
        return max(LEAST_ADDED, self.share / max(0.01, 1 - self.share))


def find_size(
    share_at: Callable[[float], float],
    wanted: float,
    *,
    first: float,
    limits: tuple[float, float],
    tried: list[Tried],
    whole: bool = False,
) -> float:
    """Returns the size tried whose share is nearest to the wanted one.

    What a fault adds goes with its size, or against it, as with the rows of a batch that dilute it: so the
    next size is looked for on a straight line of both logarithms, through the points around what is wanted.

    Args:
        share_at: Measures a size.
        wanted: Part of the step, 0 to 1.
        first: The first size to try; about half of the step.
        limits: A size that costs little, and one that costs much.
        tried: What is known already; gets what is tried here.
        whole: Whether sizes are whole numbers.
    """

    def rounded(size: float) -> float:
        inside = min(max(size, min(limits)), max(limits))
        return float(max(1, round(inside))) if whole else inside

    for _ in range(ROUNDS):
        if any(abs(one.share - wanted) <= TOLERANCE for one in tried):
            break
        size = rounded(next_size(tried, wanted, limits) if tried else first)
        if any(abs(one.size - size) <= 0.01 * size for one in tried):
            break
        tried.append(Tried(size, share_at(size)))
    return min(tried, key=lambda one: abs(one.share - wanted)).size


def next_size(tried: list[Tried], wanted: float, limits: tuple[float, float]) -> float:
    """Returns where the wanted share should be, by what has been tried."""
    goal = math.log(wanted / (1 - wanted))
    grows = limits[1] > limits[0]
    # Of several that cost nothing, the last.
    nearest = {one: (one.share, one.size if grows else -one.size) for one in tried}
    below = max((one for one in tried if one.share < wanted), key=nearest.__getitem__, default=None)
    above = min((one for one in tried if one.share >= wanted), key=nearest.__getitem__, default=None)
    if below is not None and above is not None and below.added < above.added:
        if (
            below.added == LEAST_ADDED
        ):  # it begins to cost something in between, and then goes with its size
            return below.size + (above.size - below.size) * math.exp(goal) / above.added
        part = (goal - math.log(below.added)) / (math.log(above.added) - math.log(below.added))
        return below.size * (above.size / below.size) ** part
    known = below or above
    assert known is not None
    factor = wanted / (1 - wanted) / known.added
    # Never more than eightfold: where it seems to cost nothing, noise says how much.
    factor = min(8.0, max(1 / 8, factor))
    return known.size * (factor if grows else 1 / factor)
