"""Tunes a running job: finds what to try, measures it on the job itself, keeps what helps, undoes the rest.

Everything here runs on the training thread, between two steps, and never waits: the plan is a generator
that is resumed at each step's end with the time the step took.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict

from diagnose.actions.base import Action, CannotApply
from diagnose.core.trial import Measured, Outcome, Safety, Trial
from diagnose.core.units import NS_PER_S
from diagnose.tuner.diagnosis import Diagnosis
from diagnose.tuner.installed import Installed
from diagnose.tuner.kept import Kept
from diagnose.tuner.paired import CONFIRM_CONFIDENCE, LITTLE, MANY_PAIRS, MAX_PAIRS, PairedTest, Verdict
from diagnose.tuner.policy import Candidate, Lead, Policy, candidates
from diagnose.tuner.windows import best_of, measure, settle
from diagnose.tuner.world import Numerics, Plan, Spending, Step, World

WARMUP_STEPS = 5
OBSERVED_STEPS = 25
OBSERVED_NS = 2 * NS_PER_S
"""A diagnosis needs so many steps beyond the warm-up, and so much time: the records reach the disk twice a
second, and the operating system is read as often."""

CONFIRM_PAIRS = 6

DOUBT_PAIRS = 6
"""So many more where the first ones do not tell."""

RECHECK_STEPS = 500
RECHECK_PAIRS = 2
LOST = 0.98
"""What is kept is measured again after so many steps. Where that looks like a loss of 2 % it is looked at
as closely as at first, and undone if the interval then lies below 1."""


class Controller:
    """One process's tuning.

    Args:
        world: The process.
        policy: What the user allows.
        reuse: Settings of an earlier run to put in force at once, instead of trials.

    Attributes:
        state: What is being done: `observing`, `trying`, `confirming`, `holding`, `ended`.
    """

    def __init__(self, world: World, policy: Policy, reuse: Sequence[Kept] | None = None) -> None:
        self.state = ""
        self._world = world
        self._policy = policy
        self._kept: list[Installed] = []
        self._under_trial: list[Installed] = []
        self._measuring: tuple[Candidate, PairedTest, int] | None = None
        self._done: set[str] = set()
        self._diagnosis: Diagnosis | None = None
        self._resumed_ns = world.clock()
        self._spending = Spending(self._resumed_ns)
        self._step = Step(number=0, time_ns=0, aside=False)
        self._plan: Plan[None] | None = self._tune() if reuse is None else self._reuse(reuse)
        next(self._plan)

    # -- what the process calls

    def boundary(self, number: int, aside: bool) -> None:
        """A step of the script has ended. Raises no `Exception`.

        Args:
            number: How many steps have finished.
            aside: Whether the step also evaluated, saved or compiled.
        """
        if self._plan is None:
            return
        try:
            for call in list(self._world.job.on_step):
                call()
            time_ns = self._world.clock() - self._resumed_ns
            self._step = Step(number=number, time_ns=time_ns, aside=aside)
            self._plan.send(self._step)
        except StopIteration:
            self._end("")
        except Exception:  # noqa: BLE001 (an error of ours ends the tuning, not the script)
            self._end(traceback.format_exc(limit=-4).strip())
        self._resumed_ns = self._world.clock()

    def finish(self) -> None:
        """The script ends, however it does: everything is undone. Raises no `Exception`."""
        if self._measuring is not None:
            candidate, test, first = self._measuring
            reason = f"the script ended after {len(test.logs)} pairs of windows"
            self._report(candidate, Outcome.CANNOT_TELL, reason, test=test, first=first)
        if self._plan is not None:
            self._end("")

    # -- the plan

    def _tune(self) -> Plan[None]:
        first = yield from self._observe(WARMUP_STEPS)
        while True:
            leads = yield from self._diagnose(first)
            kept = False
            while not kept and (ahead := self._ahead(leads)):
                while not self._spending.affordable(self._world.clock()):
                    yield
                kept = yield from self._try(ahead[0])
            if not kept:
                break
            first = yield from self._observe(max(each.action.settle_steps for each in self._kept))
        yield from self._confirm_and_hold()

    def _reuse(self, wanted: Sequence[Kept]) -> Plan[None]:
        self._enter("observing")
        for _ in range(WARMUP_STEPS):
            yield
        self._enter("trying")
        for each in wanted:
            action = self._world.actions.get(each.action)
            reason = "there is no such action"
            if action is not None:
                reason = yield from self._put_in_force(each, action)
            self._tell(
                Trial(
                    action=each.action,
                    value=each.value,
                    safety=action.safety if action else Safety.EXACT,
                    outcome=Outcome.REFUSED if reason else Outcome.KEPT,
                    reason=reason,
                    first_step=self._step.number,
                )
            )
        yield from settle(self._kept)
        yield from self._confirm_and_hold()

    def _put_in_force(self, wanted: Kept, action: Action) -> Plan[str]:
        """Returns why it was not, if it was not."""
        if not self._policy.allows(action.safety):
            return _needs_leave(action.safety)
        try:
            action.check(self._world.job)
            installed = self._install(wanted.action, action, wanted.value)
            numerics = yield from self._check_numerics(installed)
            if numerics is not None and not numerics.ok:
                self._remove_trial()
                return numerics.reason
            installed.switch(True)
        except CannotApply as error:
            self._remove_trial()
            return str(error)
        self._keep(installed)
        return ""

    def _observe(self, warmup: int) -> Plan[int]:
        """Lets the script run; returns the first step that counts."""
        self._enter("observing")
        for _ in range(max(warmup, 1)):
            yield
        first, begun = self._step.number, self._world.clock()
        while self._step.number < first + OBSERVED_STEPS or self._world.clock() - begun < OBSERVED_NS:
            yield
        return first

    def _diagnose(self, first: int) -> Plan[list[Lead]]:
        self._diagnosis = self._world.diagnose(first)
        while (leads := self._diagnosis.leads()) is None:
            yield
        self._diagnosis = None
        return leads

    def _ahead(self, leads: Sequence[Lead]) -> list[Candidate]:
        in_force = [installed.name for installed in self._kept]
        return candidates(leads, self._world.actions, self._policy, self._done, in_force)

    def _try(self, candidate: Candidate) -> Plan[bool]:
        """Tries one action; returns whether it was kept."""
        action = candidate.action
        self._done.add(candidate.name)
        if not self._policy.allows(action.safety):
            self._report(candidate, Outcome.NOT_ALLOWED, _needs_leave(action.safety))
            return False
        first = self._step.number
        test = PairedTest(MANY_PAIRS if candidate.lead.gain.speedup < LITTLE else MAX_PAIRS)
        try:
            action.check(self._world.job)
            if self._policy.dry_run:
                self._report(candidate, Outcome.NOT_TRIED, "a dry run changes nothing")
                return False
            self._enter("trying")
            begun = self._world.clock()
            choices = [
                self._install(candidate.name, action, value) for value in action.values(self._world.job)
            ]
            self._spending.spent_ns += self._world.clock() - begun
            if not choices:
                raise CannotApply("there is no other value to try")
            numerics = yield from self._check_numerics(choices[0])
            if numerics is not None and not numerics.ok:
                raise CannotApply(numerics.reason)
            self._measuring = candidate, test, first
            best = yield from best_of(choices)
            for other in reversed([choice for choice in choices if choice is not best]):
                self._remove(other)
            verdict = yield from measure(self._world, [best], test, self._spending)
            best.switch(verdict is Verdict.FASTER)
        except CannotApply as error:
            self._measuring = None
            self._remove_trial()
            self._report(candidate, Outcome.REFUSED, str(error), test=test, first=first)
            return False
        self._measuring = None
        outcome = {Verdict.FASTER: Outcome.KEPT, Verdict.NOT_FASTER: Outcome.REVERTED}.get(
            verdict or Verdict.CANNOT_TELL, Outcome.CANNOT_TELL
        )
        reason = numerics.reason if numerics is not None else ""
        self._report(candidate, outcome, reason, test=test, first=first, value=best.value)
        if outcome is Outcome.KEPT:
            self._keep(best)
        self._remove_trial()
        return outcome is Outcome.KEPT

    def _confirm_and_hold(self) -> Plan[None]:
        """Measures what is kept, all together: at once, and then now and again."""
        if not self._kept:
            return
        self._enter("confirming")
        yield from self._measure_kept("confirmation", CONFIRM_PAIRS, lambda found: found.low > 1)
        while self._kept:
            self._enter("holding")
            until = self._step.number + RECHECK_STEPS
            while self._step.number < until:
                yield
            yield from self._measure_kept("recheck", RECHECK_PAIRS, lambda found: found.speedup > LOST)

    def _measure_kept(self, kind: str, pairs: int, enough: Callable[[Measured], bool]) -> Plan[None]:
        for installed in reversed(self._kept):
            installed.switch(False)
        test = PairedTest()
        yield from measure(self._world, self._kept, test, self._spending, pairs)
        measured = test.measured(CONFIRM_CONFIDENCE)
        assert measured is not None
        if not enough(measured):
            yield from measure(self._world, self._kept, test, self._spending, pairs + DOUBT_PAIRS)
            measured = test.measured(CONFIRM_CONFIDENCE)
            assert measured is not None
        self._world.tell(kind, asdict(measured))
        if measured.high < 1:
            while self._kept:
                self._kept.pop().remove()
            reason = (
                f"steps came to be {1 / measured.speedup:.2f} times slower with all changes than without"
            )
            self._world.tell("undone", {"reason": reason})
        for installed in self._kept:
            installed.switch(True)

    # -- putting in and taking out

    def _install(self, name: str, action: Action, value: int | None) -> Installed:
        installed = Installed(name, action, self._world.job, value)
        self._under_trial.append(installed)
        return installed

    def _keep(self, installed: Installed) -> None:
        self._under_trial.remove(installed)
        self._kept.append(installed)

    def _remove(self, installed: Installed) -> None:
        self._under_trial.remove(installed)
        installed.remove()

    def _remove_trial(self) -> None:
        for installed in reversed(list(self._under_trial)):
            self._remove(installed)

    def _check_numerics(self, installed: Installed) -> Plan[Numerics | None]:
        if installed.action.touches == "nothing":
            return None
        with self._world.watch():
            yield
            begun = self._world.clock()
            try:
                return self._world.check_numerics(self._world.job, installed)
            finally:
                self._spending.spent_ns += self._world.clock() - begun

    def _end(self, error: str) -> None:
        """Undoes everything in reverse order, whatever fails, and leaves the job alone."""
        self._plan = None
        errors = [error] if error else []
        for installed in reversed([*self._kept, *self._under_trial]):
            try:
                installed.remove()
            except Exception:  # noqa: BLE001 (the others must still be undone)
                errors.append(f"undoing {installed.name}: {traceback.format_exc(limit=-3).strip()}")
        self._kept.clear()
        self._under_trial.clear()
        if self._diagnosis is not None:
            self._diagnosis.close()
            self._diagnosis = None
        for text in errors:
            self._world.tell("tuning_error", {"error": text})
        self._enter("ended")
        self._world.stop()

    # -- telling

    def _enter(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._world.tell("tuning", {"state": state, "step": self._step.number})

    def _report(
        self,
        candidate: Candidate,
        outcome: Outcome,
        reason: str,
        *,
        test: PairedTest | None = None,
        value: int | None = None,
        first: int | None = None,
    ) -> None:
        action = candidate.action
        first_step = self._step.number if first is None else first
        self._tell(
            Trial(
                action=candidate.name,
                value=value,
                safety=action.safety,
                outcome=outcome,
                reason=reason,
                predicted=candidate.lead.gain,
                measured=test.measured() if test is not None else None,
                rule=candidate.lead.rule,
                first_step=first_step,
                steps_spent=self._step.number - first_step,
                settings=action.settings(self._world.job, value) if outcome is Outcome.KEPT else {},
            )
        )

    def _tell(self, trial: Trial) -> None:
        self._world.tell("trial", trial.as_record())


def _needs_leave(safety: Safety) -> str:
    return f"it needs leave: --allow {safety.value}"
