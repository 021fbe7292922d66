"""Is a job faster with changes than without? Measures it by windows with them and without, in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

from diagnose.actions.base import Action
from diagnose.tuner.agreement import switch
from diagnose.tuner.installed import Installed
from diagnose.tuner.paired import MIN_PAIRS, PairedTest, Verdict
from diagnose.tuner.windows import Window, settle, settle_steps, window
from diagnose.tuner.world import Plan, Spending, World
from diagnose.tuner.woven import Uneven, can_weave, woven


def untouched(
    world: World, action: Action, test: PairedTest, spending: Spending, with_ns: float
) -> Plan[list[float]]:
    """Measures some windows with an action taken out that was tried, and left nothing prepared.

    Args:
        test: What its trial has come to.
        spending: Gets what they cost.
        with_ns: What a step took with it.

    Returns:
        Mean nanoseconds of a step in each window, the same on every rank.
    """
    found = []
    for _ in range(MIN_PAIRS):
        apart = action.spares_collections
        seen = yield from window(world, action.window_steps, action.period_steps, pauses_apart=apart)
        found.append(seen.plus(test.unseen_ns).mean_ns)
        spending.spent_ns += max(0.0, found[-1] - with_ns) * seen.steps
    return found


def measure(
    world: World, changes: Sequence[Installed], test: PairedTest, spending: Spending, pairs: int = 0
) -> Plan[Verdict | None]:
    """Measures pairs of windows, the changes off and on, until the test has a verdict.

    The changes are left as they were in the last window.

    Args:
        changes: What is switched, all together; off at first.
        test: Gets the pairs.
        spending: Gets what they cost.
        pairs: Measure so many pairs instead, whatever the test says.
    """
    actions = [action for change in changes for action in change.actions]
    # Of its own for each state: where one is ten times as fast, its windows have ten times as many steps.
    length = dict.fromkeys((False, True), max(action.window_steps for action in actions))
    period = math.lcm(*(action.period_steps for action in actions))
    resizes = any(change.action.resizes for change in changes)
    apart = any(action.spares_collections for action in actions)
    left_ns = 0.0
    if apart:
        told = world.ranks.exchange("what collections take", [*world.pauses.usual_ns()])
        test.unseen_ns, test.error_ns = max(told)
    state: bool | None = None
    usual_ns, weaves = 0.0, True
    while True:
        if weaves and can_weave(world, changes):  # which may turn out only now, as an epoch has ended
            with suppress(Uneven):
                return (yield from woven(world, changes, test, spending, pairs))
            weaves, state = False, None
            if pairs and len(test.logs) >= pairs:
                return None
        may_end = not (pairs or test.logs or resizes)  # a verdict may follow from the first pair alone
        seen: dict[bool, Window] = {}
        # Off, on, on, off: a drift hits both alike, and every second change of state is saved.
        for on in (False, True) if len(test.logs) % 2 == 0 else (True, False):
            if on is not state:
                with spending.charged(world.clock):
                    switch(world, changes, on)
                begun = world.clock()
                yield from settle(changes)
                if usual_ns:
                    took_ns = world.clock() - begun - settle_steps(changes) * usual_ns
                    spending.spent_ns += max(0.0, took_ns)
                state = on
            limit_ns = (usual_ns if on else math.inf) if may_end else 0.0  # both are looked at after a step
            seen[on] = yield from window(world, length[on], period, limit_ns, pauses_apart=apart)
            length[on] = seen[on].steps
            usual_ns = min(usual_ns, seen[on].mean_ns) if usual_ns else seen[on].mean_ns
        if apart:
            left_ns = max(world.ranks.exchange("what collections still take", world.pauses.left_ns()))
        without, with_change = seen[False].plus(test.unseen_ns), seen[True].plus(left_ns)
        without_ns = without.mean_ns
        with_ns = with_change.ns_for(without.samples) if resizes else with_change.mean_ns
        test.add(without_ns, with_ns, length[False] + settle_steps(changes))
        spending.spent_ns += max(0.0, with_ns - without_ns) * length[True]
        if pairs:
            if len(test.logs) >= pairs:
                return None
        elif verdict := test.verdict():
            return verdict
