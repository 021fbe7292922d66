"""What comes before a change is in force: may it be, is it ready, and does the job compute the same?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.agreement import together
from diagnose.tuner.changes import Changes, may_give_up
from diagnose.tuner.installed import Installed
from diagnose.tuner.pauses import PATIENCE_STEPS
from diagnose.tuner.world import Numerics, Plan, Spending, World

UNCHECKED = ("nothing", "ranks")
"""What actions touch that no numerics check can look at."""


def look(world: World, action: Action, patience_steps: int = PATIENCE_STEPS) -> None:
    """Looks whether an action can be tried now.

    Args:
        patience_steps: See `Pauses.check`.

    Raises:
        NotYet: If it may be later.
        CannotApply: If not.
    """
    refuse_between(world.job)
    action.check(world.job)
    if action.spares_collections:
        world.pauses.check(patience_steps)


def refuse_between(job: Job) -> None:
    """Raises `NotYet` while the script is between two trainings: an action would find nothing then."""
    if job.is_between:
        raise NotYet("the script trains nothing at the moment")


def prepared(
    world: World,
    changes: Changes,
    name: str,
    action: Action,
    values: Sequence[int | None],
    spending: Spending,
) -> Plan[tuple[list[Installed], str]]:
    """Prepares an action with each of some settings, and compares what the job computes with the first.

    Both know of the model's latest call: some actions make it again to see what they can do.

    Returns:
        What is prepared, and what the comparison has come to, in words.

    Raises:
        CannotApply: If the action refuses, or the job would compute what the action may not change.
    """
    with watched(world, action):
        if action.touches not in UNCHECKED:
            yield 1
        with spending.charged(world.clock):
            choices = [changes.install(name, action, value) for value in values]
        reason = _compared(world, choices[0], spending)
    for _ in range(action.learning_steps):
        yield 1
    return choices, reason


def numerics_allow(world: World, installed: Installed, spending: Spending) -> Plan[str]:
    """Compares what the job computes with an action and without, on every rank; returns it in words.

    Raises:
        CannotApply: If they differ by more than the action may.
    """
    with watched(world, installed.action):
        if installed.action.touches not in UNCHECKED:
            yield 1
        return _compared(world, installed, spending)


def watched(world: World, action: Action) -> AbstractContextManager[None]:
    """While open, what passes beside the training need of a step is remembered."""
    return nullcontext() if action.touches in UNCHECKED else world.watch()


def _compared(world: World, installed: Installed, spending: Spending) -> str:
    if installed.action.touches in UNCHECKED:
        return ""

    def check() -> dict[str, Any]:
        numerics: Numerics = world.check_numerics(world.job, installed)
        if not numerics.ok:
            raise CannotApply(numerics.reason)
        return {"reason": numerics.reason}

    with spending.charged(world.clock):
        return str(together(world, f"numerics of {installed.name}", check, dear=True)[0]["reason"])


def refuse_to_stay(world: World, changes: Sequence[Installed]) -> None:
    """Raises `CannotApply` on every rank if one has found that a change must not stay."""
    asked = [each for each in changes if may_give_up(each.action)]

    def look() -> None:
        for each in asked:
            reason = each.why_not_stay()
            if reason:
                raise CannotApply(reason)

    if asked:  # the same on every rank: each question costs milliseconds
        together(world, f"looking after {', '.join(each.name for each in asked)}", look)


def refuse_over(world: World, changes: Sequence[Installed]) -> None:
    """Raises `NotYet` on every rank if one has nothing left that a change works on: what was measured last
    was measured without it."""
    hung = [each for each in changes if each.action.hangs_on]

    def look() -> None:
        for each in hung:
            each.refuse_over()

    if hung:
        together(world, "looking for what is over", look)


def needs_leave(safety: Safety) -> str:
    """Says what allows such an action."""
    return f"it needs leave: --allow {safety.value}"
