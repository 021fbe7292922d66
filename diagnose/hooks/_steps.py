"""Finds where one training step ends and the next begins, in any loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class StepFinder:
    """Ends a step when an optimizer has stepped and the next batch is asked for.

    A loop with a DataLoader asks in `next(loader)`. A loop without one asks in code no hook can see, so the
    beginning of the next forward pass is kept as a *provisional* end, and counts once the same optimizer
    steps again: until then it may be the second half of a step that has two optimizers.

    Args:
        mark: Returns the state of the ledger now, from which a step can be closed later; with
            `where_stepped`, one that stands for where an optimizer last stepped.
        close: Ends the step at a mark, where `batch_asked` does not.

    Attributes:
        stepped: Identities of the optimizers that have stepped in the open step.
        provisional: Mark of the open step's provisional end.
        asks: How often a loader was asked for a training batch in the open step.
        marked: Whether the script marks its steps itself; then nothing here ends one.
    """

    __slots__ = (
        "_close",
        "_last_set",
        "_mark",
        "asks",
        "marked",
        "provisional",
        "stepped",
    )

    def __init__(self, mark: Callable[..., Any], close: Callable[[Any], None]) -> None:
        self._mark = mark
        self._close = close
        self._last_set: set[int] = set()
        self.stepped: set[int] = set()
        self.provisional: Any = None
        self.asks = 0
        self.marked = False

    def batch_asked(self) -> bool:
        """The loop asks a loader for a training batch. Returns whether the open step ends here."""
        stepped = self.stepped
        if not stepped:
            self.asks += 1
            return False
        self._last_set, self.stepped = stepped, set()
        self.provisional = None
        self.asks = 1
        return True

    def work_begins(self, by_optimizer: bool = False) -> None:
        """A training forward, a backward or an optimizer step begins. That of an optimizer in a loop with a
        loader begins no step: one may step for each of its groups."""
        if self.stepped and self.provisional is None and not (by_optimizer and self.asks):
            self.provisional = self._mark()

    def optimizer_stepped(self, optimizer: int) -> None:
        """An optimizer has stepped, or a gradient scaler has skipped its step.

        Args:
            optimizer: Identity of the optimizer.
        """
        if self.provisional is not None:
            if optimizer in self.stepped:
                self._end(self.provisional)
            self.provisional = None
        self.stepped.add(optimizer)

    def ends_here(self) -> bool:
        """Whether the work that begins now is the next step's, in a loop that asks no loader."""
        return self.provisional is None and not self.asks and self.looks_complete()

    def looks_complete(self) -> bool:
        """Whether the open step already holds every optimizer that the step before it had."""
        return bool(self.stepped) and self.stepped >= self._last_set

    def finish(self) -> None:
        """The script ends: closes the last step where its last optimizer step ended."""
        if self.stepped:
            self._end(self._mark(where_stepped=True))

    def _end(self, mark: Any) -> None:
        self._last_set, self.stepped = self.stepped, set()
        self.provisional = None
        self.asks = 0
        if not self.marked:
            self._close(mark)
