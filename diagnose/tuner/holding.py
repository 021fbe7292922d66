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
        enough: Whether they are: nothing is undone then.

    Returns:
        About how many more steps could have been made meanwhile; the same on every rank.
    """
    kept = [each for each in changes.kept if not (each.action.at_start or each.action.frees_memory)]
    test = PairedTest()
    if not kept:
        return 0
    slowed = math.prod(each.slowed for each in kept)
    try:
        switch(world, kept, False)
        yield from measure(world, kept, test, spending, pairs[0])
        measured = test.measured(CONFIRM_CONFIDENCE)
        assert measured is not None
        measured = against_untouched(measured, slowed)
        doubted = not enough(measured)
        if doubted:
            yield from measure(world, kept, test, spending, sum(pairs))
            measured = test.measured(CONFIRM_CONFIDENCE)
            assert measured is not None
            measured = against_untouched(measured, slowed)
    except CannotApply:
        changes.put_back()
        return 0
    world.tell(kind, asdict(measured))
    if doubted and measured.high < 1:
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
