"""One action tried on the job, from the first look at it to what became of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from diagnose.actions.base import CannotApply, NotYet
from diagnose.core.trial import ASKED_FOR, IN_PLACE, Outcome, Trial
from diagnose.core.units import NS_PER_S, format_ms
from diagnose.tuner.agreement import switch, together
from diagnose.tuner.changes import Changes
from diagnose.tuner.installed import Installed
from diagnose.tuner.loss_trend import LossAlarm
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
from diagnose.tuner.preparing import (
    UNCHECKED,
    look,
    needs_leave,
    numerics_allow,
    prepared,
    refuse_to_stay,
)
from diagnose.tuner.windows import WINDOW_NS, best_of, measure, settle, untouched
from diagnose.tuner.world import Plan, Snapshot, Spending, World

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
        world: The process.
        policy: What the user allows.
        changes: Gets the action if it helps.
        spending: Gets what the trial costs.
        step: Returns the number of finished steps.

        usual_ns: What a step takes now.

    Attributes:
        too_dear: Whether it is only too early because the run would have to be longer for it to pay.
    """

    def __init__(
        self,
        world: World,
        policy: Policy,
        changes: Changes,
        spending: Spending,
        step: Callable[[], int],
        usual_ns: float = 0.0,
    ) -> None:
        self._world = world
        self._policy = policy
        self._changes = changes
        self._spending = spending
        self._step = step
        self._usual_ns = usual_ns
        self.too_dear = False
        self._without: tuple[int, int, float] | None = None
        self._first = step()
        self._candidate: Candidate | None = None
        self._test: PairedTest | None = None
        self._snapshot: Snapshot | None = None
        self._snapshot_at = 0

    def run(self, candidate: Candidate, begins: Callable[[], None]) -> Plan[Trial]:
        """Tries an action; what helps is in force in the end, and all else undone.

        Args:
            candidate: The action.
            begins: Called before the job is changed.

        Raises:
            RankFailed, RanksLost: See `agreement.together`.
        """
        if not self._policy.allows(candidate.action.safety):
            return self._trial(candidate, Outcome.NOT_ALLOWED, needs_leave(candidate.action.safety))
        instead = [kept for kept in self._changes.kept if kept.name in candidate.instead]
        trial = yield from self._tried(candidate, instead, begins)
        self._charge(instead)
        if trial.outcome is Outcome.KEPT and trial.measured is not None and instead:
            faster = f"{candidate.name} took its place: {trial.measured.speedup:.2f} times as fast"
            self._changes.drop(faster, *instead)
        elif instead:
            self._changes.put_back()
            if any(kept not in self._changes.kept for kept in instead):
                gone = f"what it was to replace is not in force any more; {trial.reason}"
                trial = replace(trial, outcome=Outcome.NOT_YET, reason=gone)
        return trial

    def _tried(
        self, candidate: Candidate, instead: Sequence[Installed], begins: Callable[[], None]
    ) -> Plan[Trial]:
        """See `run`. Where it is not kept, those in whose place it would be may be in force or not."""
        name, action, world = candidate.name, candidate.action, self._world
        test = PairedTest(MANY_PAIRS if candidate.lead.speedup < LITTLE else MAX_PAIRS)
        try:
            if instead:
                yield from self._make_way(candidate, instead, begins)
            with self._spending.charged(world.clock):  # a loader's look makes some batches
                together(world, f"looking at {name}", lambda: self._look(candidate))
            if self._policy.dry_run:
                return self._trial(candidate, Outcome.NOT_TRIED, "a dry run changes nothing")
            begins()
            world.synchronize()  # what the script has still to do there is none of what the trial costs
            with self._spending.charged(world.clock):
                values = self._values(candidate)
            choices, reason = yield from prepared(
                world, self._changes, name, action, values, self._spending
            )
            self._candidate, self._test = candidate, test
            if action.safety in ASKED_FOR:
                reason = self._keep_snapshot(reason)
            best = yield from best_of(world, choices, self._spending, self._step, self._usual_ns)
            self._changes.remove(*[choice for choice in choices if choice is not best])
            if instead:
                reason = yield from self._set_against(candidate, best, instead, reason)
            verdict = yield from measure(world, [best], test, self._spending)
            assert verdict is not None
            keeps = verdict is Verdict.FASTER
            if self._may_cost(candidate) and (found := test.measured()) and found.speedup > HOPELESS:
                keeps = True
                reason = "; ".join(filter(None, [reason, "kept for the memory that it frees"]))
            elif keeps and not instead and self._is_doubtful(test):
                doubt = yield from self._look_again(candidate, best, test)
                if doubt:
                    self._candidate = None
                    return self._trial(candidate, Outcome.CANNOT_TELL, doubt)
                best = self._changes.tried[-1]
            switch(world, [best], keeps)
            best.instead = ()
            refuse_to_stay(world, [best])
        except CannotApply as refusal:
            self._candidate = None
            self._changes.remove(*self._changes.tried)
            outcome = Outcome.NOT_YET if isinstance(refusal, NotYet) else Outcome.REFUSED
            return self._trial(candidate, outcome, str(refusal), test)
        except LossAlarm as alarm:
            trial = yield from self._cut_short(candidate, test, alarm)
            self._candidate = None
            return trial
        self._candidate = None
        outcome = Outcome.KEPT if keeps else OUTCOMES[verdict]
        trial = self._trial(candidate, outcome, reason, test, best)
        if trial.outcome is Outcome.KEPT:
            best.measured = trial.measured
            self._changes.keep(best)
        self._changes.remove(*self._changes.tried)
        return trial

    def _may_cost(self, candidate: Candidate) -> bool:
        """Whether the user wants the memory that it frees, and it need not make steps faster."""
        return candidate.action.frees_memory and candidate.name in self._policy.only

    def _is_doubtful(self, test: PairedTest) -> bool:
        """Whether a gain may only be of what preparing the action costs: with it steps are no faster than
        before that, or without it far slower."""
        usual_ns: float = max(self._world.ranks.exchange("what a step took", self._usual_ns))
        without_ns, with_ns = statistics.fmean(test.without_ns), statistics.fmean(test.with_ns)
        return usual_ns > 0 and (with_ns >= usual_ns or without_ns > SLOWED * usual_ns)

    def _look_again(self, candidate: Candidate, best: Installed, test: PairedTest) -> Plan[str]:
        """Takes an action out and looks at untouched steps: the machine may have become slower meanwhile.
        Where the action is faster than these it is prepared once more, and is the last one tried.

        Returns:
            Why it is not believed, and is out; empty if it is.
        """
        world, name, action = self._world, candidate.name, candidate.action
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

    def _make_way(
        self, candidate: Candidate, instead: Sequence[Installed], begins: Callable[[], None]
    ) -> Plan[None]:
        """Takes out what is kept, so that an action can be looked at that excludes it.

        Raises:
            NotYet: If it is too early for that; nothing was changed.
        """
        world, action = self._world, candidate.action

        def look() -> None:
            try:
                action.check(world.job)
            except NotYet:
                raise
            except CannotApply:
                """What is in force may be the reason."""

        together(world, f"looking at {candidate.name}", look)
        self._weigh(candidate, instead, action.settle_steps + action.window_steps)
        begins()
        self._without = (world.clock(), self._step(), self._spending.spent_ns)
        switch(world, instead, False)
        yield from settle(instead)

    def _set_against(
        self, candidate: Candidate, best: Installed, instead: Sequence[Installed], reason: str
    ) -> Plan[str]:
        """Gets an action ready, with nothing in force that it excludes; from then on one takes the other's
        place. Returns the reason with that added.

        Raises:
            NotYet: If that would cost more than it may win in what is left, or as long as the run has been.
        """
        self._weigh(candidate, instead, best.action.settle_steps)
        yield from settle([best])
        self._charge(instead)
        best.instead = tuple(instead)
        names = ", ".join(kept.name for kept in instead)
        return "; ".join(filter(None, [f"{IN_PLACE}{names}", reason]))

    def _weigh(self, candidate: Candidate, instead: Sequence[Installed], steps: int) -> None:
        """Raises `NotYet` on all ranks if so many steps without what is kept cost more than may be won."""
        step_ns, slow_ns = _step_ns(instead)
        cost_ns = steps * max(0.0, slow_ns - step_ns)
        try:
            together(
                self._world,
                f"what {candidate.name} costs",
                lambda: self._pays(candidate, cost_ns, step_ns),
            )
        except NotYet:
            self.too_dear = True
            raise

    def _charge(self, instead: Sequence[Installed]) -> None:
        """Counts as spent what the job has lost without what is kept."""
        if self._without is None:
            return
        (begun_ns, begun, spent_ns), self._without = self._without, None
        took_ns = self._world.clock() - begun_ns - (self._step() - begun) * _step_ns(instead)[0]
        self._spending.spent_ns += max(0.0, took_ns - (self._spending.spent_ns - spent_ns))

    def _pays(self, candidate: Candidate, cost_ns: float, step_ns: float) -> None:
        left = self._world.job.steps_left()
        won_ns = (self._step() if left is None else left) * step_ns * (1 - 1 / candidate.lead.speedup)
        if won_ns < cost_ns:
            without = f"to try it the job does without {', '.join(candidate.instead)} for a while"
            raise NotYet(f"{without}, which costs {cost_ns / NS_PER_S:.1f} s, more than it could win")

    def cut_off(self, why: str) -> Trial | None:
        """Returns what became of a trial that cannot be ended; `None` if nothing was being measured."""
        if self._candidate is None or self._test is None:
            return None
        reason = f"{why} after {len(self._test.logs)} pairs of windows"
        return self._trial(self._candidate, Outcome.CANNOT_TELL, reason, self._test)

    def _look(self, candidate: Candidate) -> None:
        """Raises `CannotApply` if the action cannot be applied, or would cost more than it wins."""
        job = self._world.job
        patience_steps = 0 if candidate.name in self._policy.only else PATIENCE_STEPS
        look(self._world, candidate.action, patience_steps)
        if not candidate.asked:
            candidate.action.check_unasked(job)
        cost_s, left = candidate.action.start_up_s(job), job.steps_left() if self._step() else None
        if left is None:
            return
        # Where no step was measured there is only the mean, which holds all that came before the loop.
        since_ns = (self._world.clock() - self._spending.begun_ns) / self._step()
        step_s = (self._usual_ns or since_ns) / NS_PER_S
        if not candidate.asked:
            window_s = max(candidate.action.window_steps * step_s, WINDOW_NS / NS_PER_S)
            if left * step_s * (1 - 1 / GUESSED) < cost_s + 2 * MIN_PAIRS * window_s:
                raise CannotApply("what it could win in the rest of the run is less than a trial takes")
        if not cost_s:
            return
        share = 1 - 1 / candidate.lead.speedup if candidate.lead.gain else 1.0
        if left * step_s * share < cost_s:
            could = f"it could win {left * step_s * share:.1f} s in about {left} steps that are left"
            raise CannotApply(f"starting it takes about {cost_s:.0f} s, and {could}")

    def _keep_snapshot(self, reason: str) -> str:
        """Keeps what training has come to on every rank; adds to the reason why, if it cannot be kept."""
        world, made = self._world, []
        keep = lambda: made.append(world.snapshot(world.job))  # noqa: E731
        try:
            with self._spending.charged(world.clock):
                together(world, "keeping the weights", keep, dear=True)
            self._snapshot, self._snapshot_at = made[0], self._step()
        except CannotApply as refusal:
            without = f"tried without a way back for the weights: {refusal}"
            reason = "; ".join(filter(None, [reason, without]))
        return reason

    def _cut_short(self, candidate: Candidate, test: PairedTest, alarm: LossAlarm) -> Plan[Trial]:
        """The loss went wrong in the trial: takes the change out. The weights are put back where the loss
        is no number any more, or the change fails its numerics check now: a loss also rises by itself."""
        world, snapshot, tried = self._world, self._snapshot, self._changes.tried
        # Before it was in force, or of one that changes no numbers: an earlier change is to blame.
        if self._candidate is None or not tried or candidate.action.safety not in ASKED_FOR:
            self._changes.remove(*tried)
            return self._trial(candidate, Outcome.CANNOT_TELL, str(alarm), test)
        self._snapshot, world.loss.alarm, world.loss.paused = None, "", True
        failed = ""
        if not alarm.fatal and candidate.action.touches not in UNCHECKED:
            suspect = next((each for each in tried if each.on), tried[-1])
            suspect.instead = ()  # what it excludes comes back when it is out
            switch(world, [suspect], False)
            try:
                passed = yield from numerics_allow(world, suspect, self._spending)
            except CannotApply as refusal:
                failed, passed = str(refusal), ""
            if passed:
                self._changes.remove(*tried)
                world.loss.restart()
                if any(each.action.safety in ASKED_FOR for each in self._changes.kept):
                    world.loss.alarm = str(alarm)  # one of them may be to blame
                reason = f"{alarm}, which is not its doing: it {passed}"
                return self._trial(candidate, Outcome.CANNOT_TELL, reason, test)
        self._changes.remove(*tried)
        if not (alarm.fatal or failed):
            world.loss.restart()
            reason = f"{alarm}; that may be the script's own, and the weights are left as they are"
            return self._trial(candidate, Outcome.HARMED, reason)
        for _ in range(candidate.action.settle_steps):  # what it has left behind, as batches made ahead
            yield 1
        if snapshot is None:
            back = "the weights are as they came to be: there was no way back"
        else:
            try:
                together(world, "looking at the weights", snapshot.check)
                restore = lambda: snapshot.restore(world.job)  # noqa: E731
                together(world, "putting the weights back", restore, dear=True, back=True)
                back = f"weights and optimizer state are those of step {self._snapshot_at} again"
            except CannotApply as refusal:
                back = f"the weights could not be put back: {refusal}"
        world.loss.restart()
        why = f"{alarm}, and {failed}" if failed else str(alarm)
        return self._trial(candidate, Outcome.HARMED, f"{why}; {back}")

    def _values(self, candidate: Candidate) -> list[int | None]:
        """The settings that every rank can choose from."""
        action, job = candidate.action, self._world.job
        told = together(
            self._world, f"settings of {candidate.name}", lambda: list(action.values(job)), dear=True
        )
        values = [value for value in told[0] if all(value in others for others in told)]
        if not values:
            raise CannotApply("there is no other value to try")
        return values

    def _trial(
        self,
        candidate: Candidate,
        outcome: Outcome,
        reason: str,
        test: PairedTest | None = None,
        best: Installed | None = None,
    ) -> Trial:
        action, measured = candidate.action, test.measured() if test is not None else None
        if measured is not None and best is not None:
            measured = against_untouched(measured, best.slowed)
        return Trial(
            action=candidate.name,
            value=best.value if best is not None else None,
            safety=action.safety,
            outcome=outcome,
            reason=reason,
            predicted=candidate.lead.gain,
            measured=measured,
            rule=candidate.lead.rule,
            first_step=self._first,
            steps_spent=self._step() - self._first,
            settings=best.settings if best is not None and outcome is Outcome.KEPT else {},
        )


def _step_ns(kept: Sequence[Installed]) -> tuple[float, float]:
    """Returns how long a step takes with what is kept, and without."""
    measured = [each.measured for each in kept if each.measured is not None]
    return min(each.with_ns for each in measured), max(each.without_ns for each in measured)
