"""What is done with kept changes while training goes on, and with actions that could not be tried yet."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

from diagnose.actions.base import CannotApply, NotYet
from diagnose.core.trial import Measured
from diagnose.tuner.agreement import switch, together
from diagnose.tuner.changes import Changes
from diagnose.tuner.paired import CONFIRM_CONFIDENCE, PairedTest, against_untouched
from diagnose.tuner.preparing import look, refuse_to_stay
from diagnose.tuner.windows import measure
from diagnose.tuner.world import Plan, Spending, World

LOST = 0.98
LOSS_PAIRS = 24
LOSS_CONFIDENCE = 0.9
"""What looks like a loss of 2 % that may be none is measured over so many pairs, and undone if it still
looks like one and the interval of this confidence lies below 1: it takes less proof to undo what does not
help than to keep it. On the simulated machine of `tests/test_tuner.py` a loss of 5 % is then undone at once
in 57 of 100 runs (27 with an interval of 95 % after 12 pairs), and within 4000 steps in 98 (88); a true
gain of 5 % in 3 of 150 runs of 8000 steps (in none), each with ten measurements."""


def measure_kept(
    world: World,
    changes: Changes,
    spending: Spending,
    *,
    kind: str,
    pairs: tuple[int, int],
    enough: Callable[[Measured], bool],
) -> Plan[int]:
    """Measures what is kept, all on against all off; undoes it where steps have come to be slower.

    Args:
        world: The process.
        changes: What is kept; in force at first, and in the end unless it is undone.
        spending: Gets what it costs.
        kind: What the measurement is recorded as.
        pairs: Pairs of windows, and how many more where the first ones are not enough.
        enough: Whether they are: nothing is undone then. Where all these look like a loss, more are made.

    Returns:
        About how many more steps could have been made meanwhile; the same on every rank.
    """
    kept = [each for each in changes.kept if not (each.action.at_start or each.action.frees_memory)]
    test = PairedTest()
    if not kept:
        return 0
    slowed = math.prod(each.slowed for each in kept)

    def measured_to(num_pairs: int) -> Plan[Measured]:
        yield from measure(world, kept, test, spending, num_pairs)
        return found_with(CONFIRM_CONFIDENCE)

    def found_with(confidence: float) -> Measured:
        found = test.measured(confidence)
        assert found is not None
        return against_untouched(found, slowed)

    try:
        switch(world, kept, False)
        measured = yield from measured_to(pairs[0])
        doubted = not enough(measured)
        if doubted:
            measured = yield from measured_to(sum(pairs))
        is_lost = doubted and measured.high < 1
        if doubted and not is_lost and measured.speedup <= LOST:
            world.tell(kind, asdict(measured))  # training may be over before all pairs are made
            measured = yield from measured_to(LOSS_PAIRS)
            is_lost = measured.speedup <= LOST and found_with(LOSS_CONFIDENCE).high < 1
    except CannotApply:
        changes.put_back()
        return 0
    world.tell(kind, asdict(measured))
    if is_lost:
        slower = f"steps came to be {1 / measured.speedup:.2f} times slower with all changes than without"
        if len(kept) < len(changes.kept):  # what is there for another reason than speed stays
            changes.drop(slower, *kept)
        else:
            changes.remove(*kept)
            world.tell("undone", {"reason": slower})
    else:
        changes.put_back()
    return math.ceil(test.lost_ns / measured.with_ns)


def drop_what_must_go(world: World, changes: Changes) -> None:
    """Undoes what has turned out not to be fit to stay."""
    for installed in list(changes.kept):
        try:
            refuse_to_stay(world, [installed])
        except CannotApply as refusal:
            changes.drop(str(refusal), installed)


def is_early(world: World, name: str) -> bool:
    """Whether an action that could not be tried yet still cannot, and still may later."""
    try:
        together(world, f"looking at {name} again", lambda: look(world, world.actions[name]))
    except NotYet:
        return True
    except CannotApply:
        return False  # its trial will say why
    return False
