"""Runs windows of steps on the job, with changes and without, in turn."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.core.units import NS_PER_MS
from diagnose.tuner.installed import Installed
from diagnose.tuner.paired import PairedTest, Verdict, window_mean
from diagnose.tuner.world import Plan, Spending, World

WINDOW_STEPS = 5
WINDOW_NS = 50 * NS_PER_MS
MAX_WINDOW_STEPS = 100
"""A window is so many steps or so much time, whichever is more: pairs of longer ones spread no less."""

MAX_ASIDES = 20
"""A window leaves out so many steps that also evaluate, save or compile. A job in which every step does is
measured as it is."""


def window(least: int) -> Plan[list[float]]:
    """Returns the nanoseconds of the next steps."""
    times: list[float] = []
    asides = 0
    while len(times) < max(least, WINDOW_STEPS) or (
        sum(times) < WINDOW_NS and len(times) < MAX_WINDOW_STEPS
    ):
        step = yield
        if step.aside and asides < MAX_ASIDES:
            asides += 1
        else:
            times.append(step.time_ns)
    return times


def settle(changes: Sequence[Installed]) -> Plan[None]:
    """Lets the steps pass that show neither state."""
    for _ in range(max((change.action.settle_steps for change in changes), default=0)):
        yield


def best_of(choices: list[Installed]) -> Plan[Installed]:
    """Halves the settings by windows in turn until one is left. All are off in the end."""
    left = choices
    while len(left) > 1:
        totals = dict.fromkeys(range(len(left)), 0.0)
        for order in (range(len(left)), reversed(range(len(left)))):
            for index in order:
                for each in left:
                    each.switch(False)
                left[index].switch(True)
                yield from settle([left[index]])
                totals[index] += window_mean((yield from window(left[index].action.window_steps)))
        for each in left:
            each.switch(False)
        best = sorted(totals, key=totals.__getitem__)[: len(left) // 2]
        left = [left[index] for index in sorted(best)]
    return left[0]


def measure(
    world: World, changes: Sequence[Installed], test: PairedTest, spending: Spending, pairs: int = 0
) -> Plan[Verdict | None]:
    """Measures pairs of windows, the changes off and on, until the test has a verdict.

    The changes are left as they were in the last window.

    Args:
        world: The process.
        changes: What is switched, all together; off at first.
        test: Gets the pairs.
        spending: Gets what they cost.
        pairs: Measure so many pairs instead, whatever the test says.
    """
    length = max(change.action.window_steps for change in changes)
    state: bool | None = None
    while True:
        times: dict[bool, list[float]] = {}
        # Off, on, on, off: a drift hits both alike, and every second change of state is saved.
        for on in (False, True) if len(test.logs) % 2 == 0 else (True, False):
            if on is not state:
                begun = world.clock()
                for change in changes if on else reversed(changes):
                    change.switch(on)
                spending.spent_ns += world.clock() - begun
                yield from settle(changes)
                state = on
            times[on] = yield from window(length)
        without_ns, with_ns = window_mean(times[False]), window_mean(times[True])
        test.add(without_ns, with_ns)
        spending.spent_ns += max(0.0, with_ns - without_ns) * len(times[True])
        if pairs:
            if len(test.logs) >= pairs:
                return None
        elif verdict := test.verdict():
            return verdict
