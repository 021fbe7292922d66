"""One action tried on the job, from the first look at it to what became of it."""

from __future__ import annotations

import statistics

from diagnose.actions.base import CannotApply, NotYet
from diagnose.core.trial import ASKED_FOR, Outcome, Trial
from diagnose.core.units import NS_PER_S, format_ms
from diagnose.tuner.agreement import switch, together
from diagnose.tuner.changes import Changes
from diagnose.tuner.installed import Installed
from diagnose.tuner.loss_trend import LossAlarm
from diagnose.tuner.measuring import measure, untouched
from diagnose.tuner.paired import (
    HOPELESS,
    LITTLE,
    MANY_PAIRS,
    MAX_PAIRS,
    MIN_PAIRS,
    PairedTest,
    Verdict,
    against_untouched,
)
from diagnose.tuner.pauses import PATIENCE_STEPS
from diagnose.tuner.policy import Candidate, Policy
from diagnose.tuner.preparing import look, needs_leave, prepared, refuse_over, refuse_to_stay
from diagnose.tuner.rivals import Rivals
from diagnose.tuner.way_back import WayBack
from diagnose.tuner.windows import WINDOW_NS, best_of, settle
from diagnose.tuner.world import Course, Plan, World

OUTCOMES = {
    Verdict.FASTER: Outcome.KEPT,
    Verdict.NOT_FASTER: Outcome.REVERTED,
    Verdict.CANNOT_TELL: Outcome.CANNOT_TELL,
}

SLOWED = 1.5
"""Where steps without an action take so many times as long in its trial as they did before it was prepared,
untouched ones are looked at again: less comes and goes with the machine's other work."""

GUESSED = 1.05
"""What an action that no finding asks for is taken to win, where a trial of it is weighed."""


class Attempt:
    """One action's trial.

    Args:
        policy: What the user allows.
        changes: Gets the action if it helps.
        course: Where tuning stands; gets what the trial costs.
        usual_ns: What a step takes now.
        looked_at_ns: What it takes where each is looked at, as in a trial.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        changes: Changes,
        course: Course,
        candidate: Candidate,
        usual_ns: float,
        looked_at_ns: float,
    ) -> None:
        self._world = world
        self._policy = policy
        self._changes = changes
        self._course = course
        self._spending = course.spending
        self._candidate = candidate
        self._usual_ns = usual_ns
        self._looked_at_ns = looked_at_ns
        self._first = course.step.number
        self._rivals = Rivals(world, changes, course, candidate)
        self._test: PairedTest | None = None
        self._way_back: WayBack | None = None

    @property
    def too_dear(self) -> bool:
        return self._rivals.too_dear

    def run(self) -> Plan[Trial]:
        """Tries the action; if it helps it is in force in the end, and all else undone.

        Raises:
            RankFailed, RanksLost: See `agreement.together`.
        """
        if not self._policy.allows(self._candidate.action.safety):
            return self._trial(Outcome.NOT_ALLOWED, needs_leave(self._candidate.action.safety))
        trial = yield from self._tried()
        self._test = None
        return self._rivals.settled(trial)

    def _tried(self) -> Plan[Trial]:
        """See `run`. Where it is not kept, its rivals may be in force or not."""
        name, action, world = self._candidate.name, self._candidate.action, self._world
        test = PairedTest(MANY_PAIRS if self._candidate.lead.speedup < LITTLE else MAX_PAIRS)
        try:
            if self._rivals.kept:
                yield from self._rivals.make_way()
            with self._spending.charged(world.clock):  # a loader's look makes some batches
                together(world, f"looking at {name}", self._look)
            if self._policy.dry_run:
                return self._trial(Outcome.NOT_TRIED, "a dry run changes nothing")
            self._course.enter("trying")
            world.synchronize()  # what the script has still to do there is none of what the trial costs
            with self._spending.charged(world.clock):
                values = self._values()
            choices, reason = yield from prepared(
                world, self._changes, name, action, values, self._spending
            )
            self._test = test
            if action.safety in ASKED_FOR:
                self._way_back = WayBack(world, self._changes, self._course)
                reason = "; ".join(filter(None, [reason, self._way_back.missing]))
            best = yield from best_of(world, choices, self._course, self._usual_ns)
            self._changes.remove(*[choice for choice in choices if choice is not best])
            if self._rivals.kept:
                reason = yield from self._rivals.set_against(best, reason)
            verdict = yield from measure(world, [best], test, self._spending)
            assert verdict is not None
            refuse_over(world, [best])
            keeps = verdict is Verdict.FASTER
            if self._may_cost() and (found := test.measured()) and found.speedup > HOPELESS:
                keeps = True
                reason = "; ".join(filter(None, [reason, "kept for the memory that it frees"]))
            elif keeps and not self._rivals.kept and self._is_doubtful(test):
                doubt = yield from self._look_again(best, test)
                if doubt:
                    return self._trial(Outcome.CANNOT_TELL, doubt)
                best = self._changes.tried[-1]
            switch(world, [best], keeps)
            best.instead = ()
            refuse_to_stay(world, [best])
        except CannotApply as refusal:
            self._test = None
            self._changes.remove(*self._changes.tried)
            if isinstance(refusal, NotYet):
                return self._trial(Outcome.NOT_YET, str(refusal))
            return self._trial(Outcome.REFUSED, str(refusal), test)
        except LossAlarm as alarm:
            outcome, reason = yield from self._cut_short(alarm)
            return self._trial(outcome, reason, test if outcome is Outcome.CANNOT_TELL else None)
        self._test = None
        outcome = Outcome.KEPT if keeps else OUTCOMES[verdict]
        trial = self._trial(outcome, reason, test, best)
        if trial.outcome is Outcome.KEPT:
            best.measured = trial.measured
            self._changes.keep(best)
        self._changes.remove(*self._changes.tried)
        return trial

    def _may_cost(self) -> bool:
        """Whether the user wants the memory that it frees, and it need not make steps faster."""
        return self._candidate.action.frees_memory and self._candidate.name in self._policy.only

    def _is_doubtful(self, test: PairedTest) -> bool:
        """Whether a gain may only be of what preparing the action costs: with it steps are no faster than
        before that, or without it far slower."""
        usual_ns: float = max(self._world.ranks.exchange("what a step took", self._looked_at_ns))
        without_ns, with_ns = statistics.fmean(test.without_ns), statistics.fmean(test.with_ns)
        return usual_ns > 0 and (with_ns >= usual_ns or without_ns > SLOWED * usual_ns)

    def _look_again(self, best: Installed, test: PairedTest) -> Plan[str]:
        """Takes the action out and looks at untouched steps: the machine may have become slower meanwhile.
        Where the action is faster than these it is prepared once more, and is the last one tried.

        Returns:
            Why it is not believed, and is out; empty if it is.
        """
        world, name, action = self._world, self._candidate.name, self._candidate.action
        with_ns = statistics.fmean(test.with_ns[-MIN_PAIRS:])
        without_ns = statistics.fmean(test.without_ns[-MIN_PAIRS:])
        switch(world, [best], False)
        self._changes.remove(*self._changes.tried)
        yield from settle([best])
        found = yield from untouched(world, action, test, self._spending, with_ns)
        untouched_ns = statistics.fmean(found)
        if with_ns >= untouched_ns:
            times = [format_ms(ns) for ns in (with_ns, without_ns, untouched_ns)]
            return (
                f"with it steps took {times[0]}, without it {times[1]} in the trial, but {times[2]} with "
                "nothing of it prepared: its gain is over what preparing it costs"
            )
        (again,), _ = yield from prepared(world, self._changes, name, action, [best.value], self._spending)
        if without_ns > SLOWED * untouched_ns:
            again.slowed = without_ns / untouched_ns
        yield from settle([again])
        return ""

    def _cut_short(self, alarm: LossAlarm) -> Plan[tuple[Outcome, str]]:
        """The loss went wrong: takes out what is tried. Returns what became of the trial, and why."""
        try:
            refuse_over(self._world, self._changes.tried)
        except NotYet as refusal:  # the loss is that of another model
            self._changes.remove(*self._changes.tried)
            self._world.loss.restart()
            return Outcome.NOT_YET, str(refusal)
        if self._way_back is not None and self._changes.tried:
            return (yield from self._way_back.take(self._candidate.action, alarm))
        # Before it was in force, or of one that changes no numbers: an earlier change is to blame.
        self._changes.remove(*self._changes.tried)
        return Outcome.CANNOT_TELL, str(alarm)

    def cut_off(self, why: str) -> Trial | None:
        """Returns what became of a trial that cannot be ended; `None` if nothing was being measured."""
        if self._test is None:
            return None
        reason = f"{why} after {len(self._test.logs)} pairs of windows"
        return self._trial(Outcome.CANNOT_TELL, reason, self._test)

    def _look(self) -> None:
        """Raises `CannotApply` if the action cannot be applied, or would cost more than it wins."""
        job, candidate, step = self._world.job, self._candidate, self._course.step.number
        patience_steps = 0 if candidate.name in self._policy.only else PATIENCE_STEPS
        look(self._world, candidate.action, patience_steps)
        if not candidate.asked:
            candidate.action.check_unasked(job)
        cost_s, left = candidate.action.start_up_s(job), job.steps_left() if step else None
        if left is None:
            return
        # Where no step was measured there is only the mean, which holds all that came before the loop.
        since_ns = (self._world.clock() - self._spending.begun_ns) / step
        step_s = (self._usual_ns or since_ns) / NS_PER_S
        if not candidate.asked:
            window_s = max(candidate.action.window_steps * step_s, WINDOW_NS / NS_PER_S)
            guessed = candidate.lead.speedup if candidate.lead.gain else GUESSED
            if left * step_s * (1 - 1 / guessed) < cost_s + 2 * MIN_PAIRS * window_s:
                raise CannotApply("what it could win in the rest of the run is less than a trial takes")
        if not cost_s:
            return
        share = 1 - 1 / candidate.lead.speedup if candidate.lead.gain else 1.0
        if left * step_s * share < cost_s:
            could = f"it could win {left * step_s * share:.1f} s in about {left} steps that are left"
            raise CannotApply(f"starting it takes about {cost_s:.0f} s, and {could}")

    def _values(self) -> list[int | None]:
        """The settings that every rank can choose from."""
        action, job = self._candidate.action, self._world.job
        about = f"settings of {self._candidate.name}"
        told = together(self._world, about, lambda: list(action.values(job)), dear=True)
        values = [value for value in told[0] if all(value in others for others in told)]
        if not values:
            raise CannotApply("there is no other value to try")
        return values

    def _trial(
        self, outcome: Outcome, reason: str, test: PairedTest | None = None, best: Installed | None = None
    ) -> Trial:
        measured = test.measured() if test is not None else None
        if measured is not None and best is not None:
            measured = against_untouched(measured, best.slowed)
        return Trial(
            action=self._candidate.name,
            value=best.value if best is not None else None,
            safety=self._candidate.action.safety,
            outcome=outcome,
            reason=reason,
            predicted=self._candidate.lead.gain,
            measured=measured,
            rule=self._candidate.lead.rule,
            first_step=self._first,
            steps_spent=self._course.step.number - self._first,
            settings=best.settings if best is not None and outcome is Outcome.KEPT else {},
        )
