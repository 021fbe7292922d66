"""Kept actions in whose place another one is tried: they make way, and go for good only where it wins."""

from __future__ import annotations

from dataclasses import replace

from diagnose.actions.base import CannotApply, NotYet
from diagnose.core.trial import IN_PLACE, Outcome, Trial
from diagnose.core.units import NS_PER_S
from diagnose.tuner.agreement import switch, together
from diagnose.tuner.changes import Changes
from diagnose.tuner.installed import Installed
from diagnose.tuner.policy import Candidate
from diagnose.tuner.windows import settle
from diagnose.tuner.world import Course, Plan, World


class Rivals:
    """Those that one action excludes; most exclude none.

    Args:
        changes: What is kept.
        course: Where tuning stands.

    Attributes:
        kept: The rivals.
        too_dear: Whether the action must only wait because the run would have to be longer for it to pay.
    """

    def __init__(self, world: World, changes: Changes, course: Course, candidate: Candidate) -> None:
        self.kept = [kept for kept in changes.kept if kept.name in candidate.instead]
        self.too_dear = False
        self._world = world
        self._changes = changes
        self._course = course
        self._candidate = candidate
        self._out: tuple[int, int, float] | None = None

    def make_way(self) -> Plan[None]:
        """Takes them out, so that the action can be looked at.

        Raises:
            NotYet: If it is too early for that; nothing was changed.
        """
        world, action = self._world, self._candidate.action

        def look() -> None:
            try:
                action.check(world.job)
            except NotYet:
                raise
            except CannotApply:
                pass  # what is in force may be the reason

        together(world, f"looking at {self._candidate.name}", look)
        self._weigh(action.settle_steps + action.window_steps)
        self._course.enter("trying")
        self._out = (world.clock(), self._course.step.number, self._course.spending.spent_ns)
        switch(world, self.kept, False)
        yield from settle(self.kept)

    def set_against(self, best: Installed, reason: str) -> Plan[str]:
        """Gets the action ready, with none of them in force; from then on one takes the others' place.
        Returns the reason with that added.

        Raises:
            NotYet: If that would cost more than it may win in what is left, or as long as the run has been.
        """
        self._weigh(best.action.settle_steps)
        yield from settle([best])
        self._charge()
        best.instead = tuple(self.kept)
        names = ", ".join(kept.name for kept in self.kept)
        return "; ".join(filter(None, [f"{IN_PLACE}{names}", reason]))

    def settled(self, trial: Trial) -> Trial:
        """The trial is over: they go, or come back. Returns what became of it."""
        self._charge()
        if not self.kept:
            return trial
        if trial.outcome is Outcome.KEPT and trial.measured is not None:
            faster = f"{trial.action} took its place: {trial.measured.speedup:.2f} times as fast"
            self._changes.drop(faster, *self.kept)
            return trial
        self._changes.put_back()
        if any(kept not in self._changes.kept for kept in self.kept):
            gone = f"what it was to replace is not in force any more; {trial.reason}"
            trial = replace(trial, outcome=Outcome.NOT_YET, reason=gone)
        return trial

    def _weigh(self, steps: int) -> None:
        """Raises `NotYet` on all ranks if so many steps without them cost more than may be won."""
        step_ns, slow_ns = self._step_ns()
        cost_ns = steps * max(0.0, slow_ns - step_ns)
        try:
            together(
                self._world, f"what {self._candidate.name} costs", lambda: self._pays(cost_ns, step_ns)
            )
        except NotYet:
            self.too_dear = True
            raise

    def _pays(self, cost_ns: float, step_ns: float) -> None:
        left = self._world.job.steps_left()
        steps = self._course.step.number if left is None else left
        if steps * step_ns * (1 - 1 / self._candidate.lead.speedup) < cost_ns:
            without = f"to try it the job does without {', '.join(self._candidate.instead)} for a while"
            raise NotYet(f"{without}, which costs {cost_ns / NS_PER_S:.1f} s, more than it could win")

    def _charge(self) -> None:
        """Counts as spent what the job has lost without them."""
        if self._out is None:
            return
        (begun_ns, begun, spent_ns), self._out = self._out, None
        steps, spending = self._course.step.number - begun, self._course.spending
        took_ns = self._world.clock() - begun_ns - steps * self._step_ns()[0]
        spending.spent_ns += max(0.0, took_ns - (spending.spent_ns - spent_ns))

    def _step_ns(self) -> tuple[float, float]:
        """Returns how long a step takes with them, and without."""
        measured = [each.measured for each in self.kept if each.measured is not None]
        return min(each.with_ns for each in measured), max(each.without_ns for each in measured)
