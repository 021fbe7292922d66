"""The training loss over the steps, in a few points: to be shown, not to be judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from diagnose.core.history import LOSS

MAX_POINTS = 256
"""More a small chart does not show: then each two become one. All of them are written with every flush."""

SPARSE = 8
"""While tuning rests a loss comes at least once in so many steps (`launch.tuning.LOSS_STEPS`): points of
fewer would be single ones between gaps, and no line."""

DIGITS = 6


class LossCurve:
    """Means of the loss over stretches of steps that are equally long, a power of two."""

    def __init__(self) -> None:
        self._width = 1
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, steps: int, losses: Sequence[float]) -> None:
        """Takes the losses of the latest of so many steps. What is no number is left out."""
        for step, loss in enumerate(losses, start=max(0, steps - len(losses))):
            while step >= MAX_POINTS * self._width:
                self._halve()
            at = step // self._width
            if at >= len(self._sums):
                more = at + 1 - len(self._sums)
                self._counts += [0] * more
                self._sums += [0.0] * more
            if math.isfinite(loss):
                self._sums[at] += loss
                self._counts[at] += 1

    def record(self) -> dict[str, Any]:
        """Returns how many steps a point stands for, and the points from step 0 on, `None` where none had a
        loss; empty without any. May be called in another thread."""
        width, points = self._width, list(zip(self._sums, self._counts, strict=False))
        if not any(count for _, count in points):
            return {}
        while width < SPARSE and _are_sparse([at for at, (_, count) in enumerate(points) if count], width):
            pairs = [points[at : at + 2] for at in range(0, len(points), 2)]
            points = [(sum(total for total, _ in pair), sum(count for _, count in pair)) for pair in pairs]
            width *= 2
        means = [float(f"{total / count:.{DIGITS}g}") if count else None for total, count in points]
        return {LOSS: {"width": width, "means": means}}

    def _halve(self) -> None:
        pairs = range(0, len(self._sums), 2)
        self._sums = [sum(self._sums[at : at + 2]) for at in pairs]
        self._counts = [sum(self._counts[at : at + 2]) for at in pairs]
        self._width *= 2


def _are_sparse(places: Sequence[int], width: int) -> bool:
    """Whether a point stands alone between gaps of a few steps; longer ones had no loss."""
    gaps = [width < (later - earlier) * width <= SPARSE for earlier, later in pairwise(places)]
    return any(before and after for before, after in pairwise(gaps))
