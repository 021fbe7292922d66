"""Puts in force what an earlier run has kept (`--apply`), without trials."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.trial import Outcome, Safety, Trial
from diagnose.tuner.agreement import switch, together
from diagnose.tuner.changes import Changes
from diagnose.tuner.kept import Kept
from diagnose.tuner.policy import Policy
from diagnose.tuner.preparing import needs_leave, prepared, refuse_between
from diagnose.tuner.windows import settle
from diagnose.tuner.world import Course, Plan, Spending, World


def put_in_force(
    world: World,
    policy: Policy,
    changes: Changes,
    course: Course,
    wanted: Sequence[Kept],
    postponed: dict[str, Trial],
) -> Plan[list[Kept]]:
    """Puts settings in force, and tells what became of each.

    Args:
        policy: What the user allows.
        changes: Gets them.
        course: Where tuning stands.
        wanted: The settings.
        postponed: Gets what is to be told of those for which it is too early, should that stay so.

    Returns:
        Those for which it is too early.
    """
    course.enter("trying")
    early = []
    for each in wanted:
        first_step, reason = course.step.number, ""
        try:
            reason = yield from _put(world, policy, changes, each, course.spending)
        except NotYet as refusal:
            early.append(each)
            reason = str(refusal)
        action = world.actions.get(each.action)
        trial = Trial(
            action=each.action,
            value=each.value,
            safety=action.safety if action else Safety.EXACT,
            outcome=Outcome.REFUSED if reason else Outcome.KEPT,
            reason=reason,
            first_step=first_step,
            settings={} if reason else changes.kept[-1].settings,
        )
        if each in early:
            postponed[each.action] = trial
        else:
            world.tell("trial", trial.as_record())
    yield from settle(changes.kept)
    return early


def _put(world: World, policy: Policy, changes: Changes, wanted: Kept, spending: Spending) -> Plan[str]:
    """Puts one in force; returns why not, if it was not.

    Raises:
        NotYet: If it can be later.
    """
    action: Action | None = world.actions.get(wanted.action)
    if action is None:
        return "there is no such action"
    if not policy.allows(action.safety):
        return needs_leave(action.safety)
    for other in changes.kept:
        if wanted.action in other.action.excludes or other.name in action.excludes:
            return f"it cannot be in force together with {other.name}"
    try:
        together(world, f"looking at {wanted.action}", lambda: _look(world, action, wanted))
        if action.at_start:  # no call is known yet whose numbers could be compared
            installed = changes.install(wanted.action, action, wanted.value)
        else:
            (installed,), _ = yield from prepared(
                world, changes, wanted.action, action, [wanted.value], spending
            )
        switch(world, [installed], True)
    except CannotApply as refusal:
        changes.remove(*changes.tried)
        if isinstance(refusal, NotYet):
            raise
        return str(refusal)
    changes.keep(installed)
    return ""


def _look(world: World, action: Action, wanted: Kept) -> None:
    refuse_between(world.job)
    action.check(world.job)
    if wanted.value is None and None not in (values := action.values(world.job)):
        raise CannotApply("it needs a value" + (f", such as {values[0]}" if values else ""))
    largest = action.largest(world.job)
    if wanted.value is not None and largest is not None and wanted.value > largest:
        raise CannotApply(f"it was kept with {wanted.value}; here {largest} is the most that makes sense")
