"""Runs windows of steps on the job, with changes and without, in turn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from diagnose.actions.base import CannotApply
from diagnose.core.units import NS_PER_MS
from diagnose.tuner.agreement import heed_loss, loss_now, switch
from diagnose.tuner.installed import Installed
from diagnose.tuner.paired import window_mean
from diagnose.tuner.world import Course, Plan, World

WINDOW_STEPS = 5
WINDOW_NS = 50 * NS_PER_MS
MAX_WINDOW_STEPS = 100
"""A window is so many steps or so much time, whichever is more: pairs of longer ones spread no less."""

HOPELESS_TIMES = 2
HOPELESS_NS = 1_000 * NS_PER_MS
"""Where the first step of a window takes so many times as long as steps do, and so much longer, the window
is over: the rest of it would tell the same, at that price."""

MAX_ASIDES = 20
"""A window leaves out so many steps that also evaluate, save or compile. A job in which every step does is
measured as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a window of steps came to.

    Attributes:
        mean_ns: Mean nanoseconds of a step on the slowest rank.
        steps: How many were counted.
        samples: Samples of a step on all ranks, on average; 0 where nobody counts them.
    """

    mean_ns: float
    steps: int
    samples: float

    def plus(self, ns: float) -> Window:
        """Returns the window with so much more time per step."""
        return replace(self, mean_ns=self.mean_ns + ns)

    def ns_for(self, samples: float) -> float:
        """Returns the time that so many samples took.

        Raises:
            CannotApply: If nobody counts samples.
        """
        if not (self.samples and samples):
            raise CannotApply("steps would have more samples, and no loader tells how many")
        return self.mean_ns * samples / self.samples


def window(
    world: World, least: int, period: int = 1, usual_ns: float = 0.0, *, pauses_apart: bool = False
) -> Plan[Window]:
    """Runs a window of steps, as long on every rank.

    A loop may be many steps ahead of its device. So the device has nothing to do when the window begins,
    and what it has still to do when the window ends counts, in either state.

    Where epochs are short it spans whole ones: their beginnings take long, and a window with one more of
    them than the next would look slower for it. Where that can be, `woven` is sooner over.

    Args:
        least: The fewest steps.
        period: Steps after which what is measured begins anew.
        usual_ns: What a step takes otherwise, the same on every rank; 0 where a window must not be broken
            off.
        pauses_apart: Leave steps with a full garbage collection out.

    Raises:
        LossAlarm: See `heed_loss`.
    """
    least = max(least, WINDOW_STEPS)
    times: list[list[int]] = [[] for _ in range(world.ranks.num)]
    beginnings: list[int] = []
    behind: list[int] = [0] * world.ranks.num
    epoch, asides, num_samples, missing = 1, 0, 0, least
    world.synchronize()
    while missing > 0:
        mine = []
        for _ in range(1 if usual_ns and not times[0] else missing):
            step = yield 1
            aside = step.aside or (pauses_apart and step.paused_ns > 0)
            mine.append((step.time_ns, aside, step.begins, step.num_samples))
        begun = world.clock()
        world.synchronize()
        left_ns = world.clock() - begun
        told = world.ranks.exchange("a window", [world.job.epoch_steps, mine, loss_now(world), left_ns])
        heed_loss([loss for _, _, loss, _ in told])
        behind = [sum(each) for each in zip(behind, (ns for *_, ns in told), strict=True)]
        if not times[0]:
            epoch = max(steps if steps <= MAX_WINDOW_STEPS else 1 for steps, *_ in told) or 1
        # What one rank does beside training, the others wait for.
        for each in zip(*(steps for _, steps, *_ in told), strict=True):
            if any(aside for _, aside, *_ in each) and asides < MAX_ASIDES:
                asides += 1
                continue
            if epoch > 1 and any(begins for _, _, begins, _ in each):
                beginnings.append(len(times[0]))
            num_samples += sum(counted for *_, counted in each)
            for own, (time_ns, *_) in zip(times, each, strict=True):
                own.append(time_ns)
        count = len(times[0])
        longest_ns = max(sum(own) + late_ns for own, late_ns in zip(times, behind, strict=True))
        begins = any(begins for _, steps, *_ in told for _, _, begins, _ in steps)
        if usual_ns and count == 1 and not begins and is_hopeless(longest_ns, usual_ns):
            break
        wanted = least
        if count >= least and longest_ns < WINDOW_NS:
            wanted = min(math.ceil(count * WINDOW_NS / max(longest_ns, 1)), MAX_WINDOW_STEPS)
        whole = epoch if epoch > 1 else period
        missing = math.ceil(max(wanted, count) / whole) * whole - count
    mean_ns = max(
        window_mean(own, beginnings) + late_ns / count for own, late_ns in zip(times, behind, strict=True)
    )
    return Window(mean_ns=mean_ns, steps=count, samples=num_samples / count)


def settle(changes: Sequence[Installed]) -> Plan[None]:
    """Lets the steps pass that show neither state."""
    for _ in range(settle_steps(changes)):
        yield 1


def settle_steps(changes: Sequence[Installed]) -> int:
    """Returns how many steps show neither state after a change."""
    return max((action.settle_steps for change in changes for action in change.actions), default=0)


def is_hopeless(step_ns: float, usual_ns: float) -> bool:
    """Whether a step takes so much longer than others that no more of its kind should be made."""
    return step_ns > max(HOPELESS_TIMES * usual_ns, usual_ns + HOPELESS_NS)


def best_of(world: World, choices: list[Installed], course: Course, usual_ns: float) -> Plan[Installed]:
    """Halves the settings by windows in turn until one is left. All are off in the end.

    Args:
        choices: The settings.
        course: Gets what they cost: what steps take longer than the fastest ones seen.
        usual_ns: What a step takes with none of them.

    Raises:
        CannotApply: If no setting is left with which steps do not take much longer than without.
    """
    if len(choices) == 1:
        return choices[0]
    usual_ns = max(world.ranks.exchange("what a step takes", usual_ns))
    left, fastest_ns, may_end = choices, usual_ns, not choices[0].action.resizes
    while len(left) > 1:
        totals = dict.fromkeys(left, 0.0)
        for choice in (*left, *left[::-1]):
            if choice not in totals:
                continue
            action, begun_ns, begun = choice.action, world.clock(), course.step.number
            try:
                switch(world, [choice], True)
            except CannotApply:
                if len(totals) == 1:
                    raise
                del totals[choice]
                continue
            yield from settle([choice])
            length, period = action.window_steps, action.period_steps
            seen = yield from window(world, length, period, usual_ns if may_end else 0.0)
            switch(world, [choice], False)
            fastest_ns = min(fastest_ns, seen.mean_ns) if fastest_ns else seen.mean_ns
            took_ns = world.clock() - begun_ns - (course.step.number - begun) * fastest_ns
            course.spending.spent_ns += max(0.0, took_ns)
            totals[choice] += seen.ns_for(1) if action.resizes else seen.mean_ns
            if seen.steps < WINDOW_STEPS:
                del totals[choice]
        if not totals:
            raise CannotApply("with each setting a step takes more than twice as long")
        best = sorted(totals, key=totals.__getitem__)[: max(1, len(left) // 2)]
        left = [choice for choice in left if choice in best]
    return left[0]
