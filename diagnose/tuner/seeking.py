"""Tries what the findings lead to, one action after the other, as long as that helps and is affordable."""

from __future__ import annotations

from dataclasses import replace

from diagnose.actions.base import CannotApply, NotYet
from diagnose.core.trial import Outcome, Trial
from diagnose.tuner.agreement import together, until
from diagnose.tuner.asking import LOOK_AGAIN_STEPS, Asking
from diagnose.tuner.changes import Changes
from diagnose.tuner.foresight import Foresight
from diagnose.tuner.holding import Holding
from diagnose.tuner.installed import alive
from diagnose.tuner.orders import Orders
from diagnose.tuner.paired import LITTLE
from diagnose.tuner.policy import Candidate, Lead, candidates, excluded_by
from diagnose.tuner.preparing import look
from diagnose.tuner.trying import Attempt
from diagnose.tuner.world import Course, Plan, World

NEVER_BEGUN = (Outcome.REFUSED, Outcome.NOT_ALLOWED)
"""What no finding asked for is not told of where this became of it."""


class Seeking:
    """The trials of one process's tuning.

    Args:
        changes: Gets what helps.
        orders: What the user allows.
        course: Where tuning stands.
        asking: Knows what to try.
        holding: Confirms what was kept.

    Attributes:
        done: Names of actions that need no (further) trial.
        postponed: What will be told of each action that it is too early for, if that stays so.
    """

    def __init__(
        self,
        world: World,
        changes: Changes,
        orders: Orders,
        course: Course,
        asking: Asking,
        holding: Holding,
    ) -> None:
        self.done: set[str] = set()
        self.postponed: dict[str, Trial] = {}
        self._world = world
        self._changes = changes
        self._orders = orders
        self._course = course
        self._asking = asking
        self._holding = holding
        self._attempt: Attempt | None = None
        self._early: dict[str, Lead] = {}
        self._too_dear: set[str] = set()
        self._foresight = Foresight(world, changes, course)

    def seek(self) -> Plan[None]:
        """Tries one action after the other, and asks the rules again where that may lead to more."""
        later = iter(LOOK_AGAIN_STEPS)
        while True:
            self._come()
            kept = measured = False
            while not kept and (ahead := self._ahead()):
                if (not ahead[0].asked or ahead[0].lead.speedup < LITTLE) and not self._unseen(ahead):
                    yield from self._holding.confirm()  # what may take or wait for long must not delay it
                if any(self._world.ranks.exchange("the budget of the run", self._is_used_up())):
                    break
                if not (yield from self._afford()):  # which may take many minutes
                    yield from self._orders.obey()
                    continue
                if self._orders.wait():
                    yield from self._orders.obey()
                    ahead = self._ahead()  # what is allowed may have changed
                if not ahead:
                    break
                if unseen := self._unseen(ahead):
                    yield from self._foresee(unseen[0])
                    continue
                trial = yield from self._try(ahead[0])
                kept, measured = trial.outcome is Outcome.KEPT, measured or trial.measured is not None
            if kept:
                if self._is_any_left() and self._asking.pays():
                    settles = max(each.action.settle_steps for each in self._changes.kept)
                    yield from self._asking.observe(settles)
                    yield from self._asking.diagnose()
                continue
            if measured or self._changes.kept or self.postponed or self._orders.policy.dry_run:
                break
            if not (yield from self._asking.again(next(later, None))):
                break

    def _unseen(self, ahead: list[Candidate]) -> list[Candidate]:
        """Returns what is to be looked into before the first of these is tried."""
        if ahead[0].lead.speedup >= LITTLE:
            return []
        return self._foresight.unseen(ahead, self._orders.policy)

    def _foresee(self, candidate: Candidate) -> Plan[None]:
        """Looks into what an action would win."""
        refused = yield from self._foresight.look(candidate, self._asking.step_ns)
        if refused is not None:
            self.done.add(candidate.name)
            self._tell(refused)

    def _is_any_left(self) -> bool:
        wanted = self._orders.policy.wanted
        return any(name not in self.done and wanted(name) for name in self._world.actions)

    def _afford(self) -> Plan[bool]:
        """Waits until another trial is affordable; returns early, with `False`, for a command, and where
        none will be any more."""
        return (
            yield from until(
                self._world,
                "the budget",
                lambda: self._course.spending.affordable(self._world.clock(), self._left_ns()),
                lambda: bool(self._world.commands) or self._is_used_up(),
            )
        )

    def _left_ns(self) -> float | None:
        """What is left of the run; `None` where nobody knows, or the user names what is to be tried."""
        left = None if self._orders.policy.only else self._world.job.steps_left()
        return None if left is None else left * self._asking.step_ns

    def _is_used_up(self) -> bool:
        """Whether this run has no time for another trial: waiting makes no more of it."""
        left_ns = self._left_ns()
        return left_ns is not None and not self._course.spending.affordable(self._world.clock(), left_ns)

    def _ahead(self) -> list[Candidate]:
        in_force = [installed.name for installed in self._changes.kept]
        found, policy = self._asking.leads or [], self._orders.policy
        fresh = [lead for lead in found if set(in_force) <= set(lead.in_force)]
        named = {name for lead in fresh for name in lead.actions}
        early = [lead for name, lead in self._early.items() if lead.in_force and name not in named]
        found = [*found, *early, *self._foresight.leads.values()]
        return candidates(found, self._world.actions, policy, self.done, in_force)

    def _try(self, candidate: Candidate) -> Plan[Trial]:
        """Tries one action."""
        self.done.add(candidate.name)
        measured = [each.measured.with_ns for each in self._changes.kept if each.measured is not None]
        self._attempt = Attempt(
            self._world,
            self._orders.policy,
            self._changes,
            self._course,
            candidate,
            usual_ns=min([self._asking.step_ns, *measured]),
            looked_at_ns=min([self._asking.looked_at_ns, *measured]),
        )
        trial = yield from self._attempt.run()
        too_dear = self._attempt.too_dear
        if too_dear:
            self._too_dear.add(candidate.name)
        self._attempt = None
        if trial.outcome is Outcome.NOT_ALLOWED:
            self._orders.without_leave[candidate.name] = trial.safety
        if trial.outcome is Outcome.NOT_YET:
            if candidate.asked or not too_dear:
                self.postponed[candidate.name] = replace(trial, outcome=Outcome.REFUSED)
                self._early[candidate.name] = replace(candidate.lead, actions=(candidate.name,), gains={})
        elif candidate.asked or trial.measured is not None or trial.outcome not in NEVER_BEGUN:
            self._tell(trial)
        if trial.outcome is Outcome.KEPT and trial.measured is not None:
            # No rule may lead to those any more: what they would cure is gone, in part.
            for name in excluded_by(candidate.name, self._early, self._world.actions):
                self._early[name] = self._early[name].beyond(candidate.name, trial.measured.speedup)
        return trial

    def looks_again(self) -> bool:
        """Whether there may be something to try: the rules are to be asked again, or a postponed action can
        be tried now."""
        if self._orders.policy.dry_run:
            return False
        come, due = self._come(), self._asking.is_due()
        if not self._orders.tries:
            return self.is_trained_again() or come
        if due:
            self._too_dear.clear()
            self._foresight.forget()
            self.done -= self._changes.over  # another training may have begun
            self._changes.over.clear()
        return due or come

    def is_trained_again(self) -> bool:
        """Whether there is something again, on every rank, that what is over could be hung on."""
        if not self._changes.over:
            return False
        job, actions = self._world.job, self._world.actions
        kinds = {kind for name in self._changes.over for kind in actions[name].hangs_on}
        there = all(alive(job, kind) for kind in kinds)
        return all(self._world.ranks.exchange("what is trained next", there))

    def _come(self) -> bool:
        """Whether actions have come to be possible that it was too early for; they may be tried now."""
        waiting = [name for name in self.postponed if name not in self._too_dear]
        with self._course.spending.charged(self._world.clock):
            come = [name for name in waiting if not self._is_early(name)]
        for name in come:
            del self.postponed[name]
        self.done -= set(come)
        return bool(come)

    def _is_early(self, name: str) -> bool:
        """Whether an action that could not be tried yet still cannot, and still may later."""
        world = self._world
        try:
            together(world, f"looking at {name} again", lambda: look(world, world.actions[name]))
        except NotYet:
            return True
        except CannotApply:
            return False  # its trial will say why
        return False

    def cut_off(self, why: str) -> None:
        """Nothing is tried any more: tells what became of the trial under way, and of what has waited."""
        trial = self._attempt.cut_off(why) if self._attempt is not None else None
        self._attempt = None
        for each in filter(None, [trial, *self.postponed.values()]):
            self._tell(each)
        self.postponed.clear()

    def _tell(self, trial: Trial) -> None:
        self._world.tell("trial", trial.as_record())
