"""What code of the loop does to weights, told by which tensors it was seen to write to."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from diagnose.source.purposes import CLIP, EMA
from diagnose.source.roles import Roles
from diagnose.store.reader import Frame

MIN_SEEN = 4
"""So often at least it must have been seen in the midst of that."""

OFTEN = 0.25
"""And in this part of the looks at it: a function may measure all gradients before it scales the first."""


class Writing:
    """Answers what a stack between the hooks writes to, one tensor after the other.

    Args:
        seen: As `RankLog.writing` has it.
        roles: Tells which functions the loop only calls: what such a one does it does as a whole.
    """

    def __init__(self, seen: Iterable[tuple[Sequence[Frame], int, int, int]], roles: Roles) -> None:
        self._roles = roles
        counts: defaultdict[tuple[str, int, str], Counter[str]] = defaultdict(Counter)
        for (_, *stack), looks, gradients, copies in seen:
            if stack:
                counts[self._part(stack)].update({"": looks, CLIP: gradients, EMA: copies})
        self._purposes = {part: _purpose(told) for part, told in counts.items()}

    def purpose(self, stack: Sequence[Frame]) -> str:
        """Returns `CLIP` of what writes to gradients, `EMA` of what writes to copies of the weights, or
        nothing.

        Args:
            stack: The user's frames, innermost first.
        """
        return self._purposes.get(self._part(stack), "")

    def _part(self, stack: Sequence[Frame]) -> tuple[str, int, str]:
        """The line, or the whole function where that is not the loop's."""
        file, line, function = stack[0]
        return (file, 0, function) if self._roles.helper(stack) is not None else (file, line, function)


def _purpose(told: Counter[str]) -> str:
    purpose = max((CLIP, EMA), key=told.__getitem__)
    return purpose if told[purpose] >= max(MIN_SEEN, OFTEN * told[""]) else ""
