"""What is done with kept changes while training goes on: they are measured all together, at once and then
now and again, and undone where they have come to cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import asdict

from diagnose.actions.base import CannotApply
from diagnose.core.trial import Measured
from diagnose.tuner.agreement import switch
from diagnose.tuner.changes import Changes
from diagnose.tuner.installed import Installed
from diagnose.tuner.loss_watch import LossWatch
from diagnose.tuner.measuring import measure
from diagnose.tuner.orders import Orders
from diagnose.tuner.paired import CONFIRM_CONFIDENCE, PairedTest, against_untouched
from diagnose.tuner.preparing import refuse_over
from diagnose.tuner.world import Course, Plan, World

CONFIRM_PAIRS = 6

DOUBT_PAIRS = 6
"""So many more where the first ones do not tell."""

LOST = 0.98
LOSS_PAIRS = 24
LOSS_CONFIDENCE = 0.9
"""What looks like a loss of 2 % that may be none is measured over so many pairs, and undone if it still
looks like one and the interval of this confidence lies below 1: it takes less proof to undo what does not
help than to keep it. On the simulated machine of `tests/simulated_job.py` a loss of 5 % is then undone at
once in 57 of 100 runs (27 with an interval of 95 % after 12 pairs), and within 4000 steps in 98 (88); a
true gain of 5 % in 3 of 150 runs of 8000 steps (in none), each with ten measurements."""

LOOK_STEPS = 100
"""So often what is kept, and what could not be tried yet, is looked at."""

RECHECK_STEPS = 500
RECHECK_PAIRS = 2
"""What is kept is measured again after so many steps. Where that looks like a loss (`LOST`) it is looked at
as closely as at first."""

RECHECK_SHARE = 0.01
"""Steps that could have been made while what is kept was taken out may be so many of all."""


class Holding:
    """The measurements of what is kept in one process's tuning.

    Args:
        changes: What is kept; in force before each measurement, and after it unless it is undone.
        orders: What the user allows.
        loss: Heeded meanwhile.
        course: Where tuning stands.
    """

    def __init__(
        self, world: World, changes: Changes, orders: Orders, loss: LossWatch, course: Course
    ) -> None:
        self._world = world
        self._changes = changes
        self._orders = orders
        self._loss = loss
        self._course = course
        self._confirmed: list[Installed] = []
        self._known: set[str] = set()
        self._lost = 0

    def hold(self, postponed: Collection[str], looks_again: Callable[[], bool]) -> Plan[bool]:
        """Measures what is kept, at once unless that was done, and then now and again.

        Args:
            postponed: What could not be tried yet, as long as that is so.
            looks_again: Whether there may be something new to try now.

        Returns:
            Whether there may be; else nothing is left to be done.
        """
        if self._orders.reopened:
            return True
        yield from self.confirm()
        while self._changes.kept or self._changes.over or postponed:
            begun = self._course.step.number
            while self._course.step.number < begun + self._recheck_steps():
                self._course.enter("holding" if self._changes.kept else "waiting")
                yield from self._orders.let_pass(LOOK_STEPS, until_reopened=True)
                self._loss.heed()
                self._changes.let_go()
                if self._orders.reopened or looks_again():
                    return True
            if self._changes.kept:
                self._lost = yield from self._measure(
                    "recheck", RECHECK_PAIRS, lambda found: found.speedup > LOST
                )
                self._confirmed = list(self._changes.kept)
        return False

    def confirm(self) -> Plan[None]:
        """Measures what is kept, unless that was done."""
        kept = list(self._changes.kept)
        names = {each.name for each in kept}
        if names <= self._known and not self._orders.tries:  # the same, on what is trained next
            self._confirmed = kept
        if kept and kept != self._confirmed:
            self._course.enter("confirming")
            lost = yield from self._measure("confirmation", CONFIRM_PAIRS, lambda found: found.low > 1)
            self._lost = round(lost * RECHECK_PAIRS / CONFIRM_PAIRS)
            if kept == self._changes.kept:
                self._known |= names
            self._confirmed = list(self._changes.kept)

    def _recheck_steps(self) -> int:
        """Returns the steps between two measurements of what is kept, by how many the last one has lost."""
        same = self._changes.kept == self._confirmed
        return max(RECHECK_STEPS, round(self._lost / RECHECK_SHARE) if same else 0)

    def _measure(self, kind: str, pairs: int, enough: Callable[[Measured], bool]) -> Plan[int]:
        """Measures what is kept, all on against all off, and undoes it where steps have come to be slower.

        Args:
            kind: What the measurement is recorded as.
            pairs: Pairs of windows.
            enough: Whether so many tell: nothing is undone then. Else more are made.

        Returns:
            About how many more steps could have been made meanwhile; the same on every rank.
        """
        world, changes, test = self._world, self._changes, PairedTest()
        kept = [each for each in changes.kept if not (each.action.at_start or each.action.frees_memory)]
        if not kept:
            return 0
        slowed = math.prod(each.slowed for each in kept)

        def measured_to(num_pairs: int) -> Plan[Measured]:
            yield from measure(world, kept, test, self._course.spending, num_pairs)
            return found_with(CONFIRM_CONFIDENCE)

        def found_with(confidence: float) -> Measured:
            found = test.measured(confidence)
            assert found is not None
            return against_untouched(found, slowed)

        try:
            switch(world, kept, False)
            measured = yield from measured_to(pairs)
            doubted = not enough(measured)
            if doubted:
                measured = yield from measured_to(pairs + DOUBT_PAIRS)
            is_lost = doubted and measured.high < 1
            if doubted and not is_lost and measured.speedup <= LOST:
                world.tell(kind, asdict(measured))  # training may be over before all pairs are made
                measured = yield from measured_to(LOSS_PAIRS)
                is_lost = measured.speedup <= LOST and found_with(LOSS_CONFIDENCE).high < 1
            refuse_over(world, kept)
        except CannotApply:
            changes.put_back()
            return 0
        world.tell(kind, asdict(measured))
        if is_lost:
            times = f"{1 / measured.speedup:.2f} times"
            slower = f"steps came to be {times} slower with all changes than without"
            if len(kept) < len(changes.kept):  # what is there for another reason than speed stays
                changes.drop(slower, *kept)
            else:
                changes.remove(*kept)
                world.tell("undone", {"reason": slower})
        else:
            changes.put_back()
        return math.ceil(test.lost_ns / measured.with_ns)
