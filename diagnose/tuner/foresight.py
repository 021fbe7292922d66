"""What an action that no rule speaks of would win, told by passes of the model beside the training."""

from __future__ import annotations

from diagnose.actions.base import CannotApply
from diagnose.core.finding import Gain
from diagnose.core.trial import Outcome, Trial
from diagnose.core.units import format_ms
from diagnose.tuner.agreement import together
from diagnose.tuner.changes import Changes
from diagnose.tuner.policy import WORTH_SPEEDUP, Candidate, Lead, Policy
from diagnose.tuner.preparing import look, watched
from diagnose.tuner.world import Course, Plan, World

SLOWER = 1.05
"""Where a pass takes so many times as long no trial is made. Less may be made up for elsewhere in the step,
as fewer threads leave more to the loader's workers."""

WON = (0.5, 1.3)
"""What is expected at least and at most, of what passes win: in a step other things run beside them."""

COST_STEPS = 12
"""Looking into one setting takes about the time of so many steps, in which nothing is trained."""


class Foresight:
    """Times a few passes with each action that changes the model and of which nobody knows what it wins.

    One pass per step is assumed: where micro-batches are added up more is won.

    Args:
        changes: Gets what is prepared, for so long.
        course: Gets what it costs.

    Attributes:
        leads: What is expected, by action; none where passes did not tell.
    """

    def __init__(self, world: World, changes: Changes, course: Course) -> None:
        self.leads: dict[str, Lead] = {}
        self._world = world
        self._changes = changes
        self._course = course
        self._seen: set[str] = set()

    def forget(self) -> None:
        """Another model may be trained by now."""
        self.leads.clear()
        self._seen.clear()

    def unseen(self, ahead: list[Candidate], policy: Policy) -> list[Candidate]:
        """Returns what is to be looked into before anything is tried that is to win little."""
        if policy.dry_run:
            return []
        return [
            each
            for each in ahead
            if each.lead.gain is None and each.action.touches == "model" and each.name not in self._seen
            if policy.allows(each.action.safety)
        ]

    def look(self, candidate: Candidate, step_ns: float) -> Plan[Trial | None]:
        """Looks into one action.

        Args:
            step_ns: What a step takes now.

        Returns:
            Why it needs no trial; `None` if it may be tried.
        """
        self._seen.add(candidate.name)
        if any(self._world.ranks.exchange("what foresight costs", self._is_too_dear(step_ns))):
            return None
        try:
            times = yield from self._times(candidate)
        except CannotApply:
            return None  # its trial will say why
        if not times or not step_ns:
            return None
        without_ns, with_ns = max(times, key=lambda pair: pair[0] - pair[1])
        if with_ns > SLOWER * without_ns:
            return Trial(
                action=candidate.name,
                value=None,
                safety=candidate.action.safety,
                outcome=Outcome.REFUSED,
                reason=f"a pass beside the training takes {format_ms(with_ns)} with it, and"
                f" {format_ms(without_ns)} without",
                predicted=None,
                rule=candidate.lead.rule,
                first_step=self._course.step.number,
            )
        won_ns = without_ns - with_ns
        gain = Gain.of(step_ns, lost_ns=won_ns, low_ns=WON[0] * won_ns, high_ns=WON[1] * won_ns)
        if gain.speedup >= WORTH_SPEEDUP:
            self.leads[candidate.name] = Lead(
                rule=candidate.lead.rule, actions=(candidate.name,), gain=gain
            )
        return None

    def _is_too_dear(self, step_ns: float) -> bool:
        left, spending = self._world.job.steps_left(), self._course.spending
        left_ns = None if left is None else left * step_ns
        return not spending.affordable(self._world.clock(), left_ns, COST_STEPS * step_ns)

    def _times(self, candidate: Candidate) -> Plan[list[tuple[float, float]]]:
        """Returns the nanoseconds of a pass without the action and with it, with each of its settings; on
        the rank that wins least. Empty where one has no passes."""
        world, name, action = self._world, candidate.name, candidate.action
        charged = self._course.spending.charged

        def check() -> list[int | None]:
            look(world, action)
            if not candidate.asked:
                action.check_unasked(world.job)
            return list(action.values(world.job))

        with charged(world.clock):
            told = together(world, f"looking at {name}", check)
        values = [value for value in told[0] if all(value in others for others in told)]
        with watched(world, action):
            yield 1
            with charged(world.clock):
                try:
                    choices = [self._changes.install(name, action, value) for value in values]
                    timed = together(
                        world,
                        f"passes with {name}",
                        lambda: [world.time_passes(world.job, each) for each in choices],
                        dear=True,
                    )
                finally:
                    self._changes.remove(*self._changes.tried)
        by_choice = list(zip(*timed, strict=True))
        if not all(all(pairs) for pairs in by_choice):
            return []
        return [min(pairs, key=lambda pair: pair[0] - pair[1]) for pairs in by_choice]
