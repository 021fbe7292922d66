"""Tunes a running job: finds what to try, measures it on the job itself, keeps what helps, undoes the rest.

Everything here runs on the training thread, between two steps: the plan is a generator that is resumed at a
step's end with the time the step took. In a job of several ranks each runs the same plan, and waits
for the others where they decide something together; see `agreement`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from diagnose.actions.base import NotYet
from diagnose.core.trial import ASKED_FOR, Measured, Outcome, Safety, Trial
from diagnose.core.units import NS_PER_S
from diagnose.tuner.agreement import RankFailed, RanksLost, until
from diagnose.tuner.changes import Changes
from diagnose.tuner.diagnosis import Diagnosis
from diagnose.tuner.holding import LOST, drop_what_must_go, is_early, measure_kept
from diagnose.tuner.installed import Installed
from diagnose.tuner.kept import Kept
from diagnose.tuner.loss_trend import LossAlarm
from diagnose.tuner.loss_watch import LossWatch
from diagnose.tuner.orders import Orders
from diagnose.tuner.policy import Candidate, Lead, Policy, candidates
from diagnose.tuner.preparing import put_in_force
from diagnose.tuner.trying import Attempt
from diagnose.tuner.windows import settle
from diagnose.tuner.world import Plan, Spending, Step, World

WARMUP_STEPS = 5
OBSERVED_STEPS = 25
OBSERVED_NS = 2 * NS_PER_S
"""A diagnosis needs so many steps beyond the warm-up, and so much time: the records reach the disk twice a
second, and the operating system is read as often."""

CONFIRM_PAIRS = 6

DOUBT_PAIRS = 6
"""So many more where the first ones do not tell."""

LEAST_LEFT_NS = 10 * NS_PER_S
"""A run that is known to be over sooner is left alone: a diagnosis, a trial and its confirmation take half
of that."""

LOOK_AGAIN_STEPS = (200, 800, 3200)
"""Where the findings led to no trial the rules are asked again after so many more steps, once that is
affordable: some faults, such as full garbage collections, come rarely."""

LOOK_LATER = 4
"""While something is kept the rules are asked again, each time after so many times as many steps."""

LOOK_STEPS = 100
"""So often an action is looked at that could not be tried yet."""

RECHECK_STEPS = 500
RECHECK_PAIRS = 2
"""What is kept is measured again after so many steps. Where that looks like a loss (`LOST`) it is looked at
as closely as at first."""

NEVER_BEGUN = (Outcome.REFUSED, Outcome.NOT_ALLOWED)
"""What no finding asked for is not told of where this became of it."""

RECHECK_SHARE = 0.01
"""Steps that could have been made while what is kept was taken out may be so many of all."""


class Controller:
    """One process's tuning.

    Args:
        world: The process.
        policy: What the user allows.
        reuse: Settings of an earlier run to put in force at once, instead of trials.

    Attributes:
        state: What is being done: `observing`, `trying`, `confirming`, `holding`, `waiting` (for something
            new to try, with nothing kept), `paused`, `frozen`, `ended`.
    """

    def __init__(self, world: World, policy: Policy, reuse: Sequence[Kept] | None = None) -> None:
        self.state = ""
        self._world = world
        self._changes = Changes(world)
        self._orders = Orders(world, policy, self._changes, self._enter)
        self._orders.tries = reuse is None
        self._loss = LossWatch(world, self._changes, self._may_harm)
        self._attempt: Attempt | None = None
        self._done: set[str] = set()
        self._postponed: dict[str, Trial] = {}
        self._too_dear: set[str] = set()
        self._confirmed: list[Installed] = []
        self._lost = 0
        self._look_at = sum(LOOK_AGAIN_STEPS)
        self._leads: list[Lead] | None = None
        self._asked_with: list[str] = []
        self._first = 0
        self._step_ns = 0.0
        self._diagnosis: Diagnosis | None = None
        self._resumed_ns = world.clock()
        self._spending = Spending(self._resumed_ns)
        self._step = Step(number=0, time_ns=0, aside=False)
        self._rests_until = 0
        self._plan: Plan[None] | None = self._tune() if reuse is None else self._reuse(reuse)
        next(self._plan)

    # -- what the process calls

    def rests(self, number: int) -> bool:
        """A step of the script has ended: returns whether `boundary` need not be called for it. Cheap."""
        if number >= self._rests_until or self._world.commands:
            return False
        self._loss.read()
        return True

    def boundary(self, number: int, aside: bool, begins: bool = False, num_samples: int = 0) -> None:
        """A step of the script has ended, unless the tuning rests. Raises no `Exception`.

        Args:
            number: How many steps have finished.
            aside: Whether the step also evaluated, saved or compiled.
            begins: Whether it began an epoch.
            num_samples: See `Step`.
        """
        if self.state == "ended":
            return
        try:
            for call in list(self._world.job.on_step):
                call()
            if self._plan is not None:
                time_ns = self._world.clock() - self._resumed_ns
                passed = max(1, number - self._step.number)
                self._step = Step(
                    number=number,
                    time_ns=time_ns,
                    aside=aside,
                    begins=begins,
                    num_samples=num_samples,
                    passed=passed,
                    # What was collected before the first step ended is the start of the script.
                    paused_ns=self._world.pauses.steps_ended(time_ns, passed) if self._step.number else 0,
                )
                alarm = self._loss.step_ended()
                steps = self._plan.throw(alarm) if alarm is not None else self._plan.send(self._step)
                may_rest = not (self._world.job.on_step or self._loss.watches())
                self._rests_until = number + steps if may_rest else 0
            else:
                self._loss.read()
        except StopIteration:
            self._end("")
        except RankFailed as error:
            self._end(str(error))
        except RanksLost as error:
            self._freeze(str(error))
        except Exception:  # noqa: BLE001 (an error of ours ends the tuning, not the script)
            self._failed(traceback.format_exc(limit=-4).strip())
        except BaseException:  # Ctrl-C, which the script may survive
            if self._world.ranks.num > 1:
                self._freeze("it was interrupted")
            raise
        self._resumed_ns = self._world.clock()
        self._world.pauses.mark()

    def finish(self) -> None:
        """The script ends, however it does: everything is undone. Raises no `Exception`."""
        self._cut_off("the script ended")
        if self.state != "ended":
            self._world.ranks.leave("its script has ended")
            self._end("")

    # -- the plan

    def _tune(self) -> Plan[None]:
        warmup, more, alarmed = WARMUP_STEPS, True, False
        while more:
            try:
                if self._leads is None or alarmed:
                    alarmed = False
                    yield from self._observe(warmup)
                if self._leads is None:
                    while warmup == WARMUP_STEPS and self._is_nearly_over():
                        yield from self._observe(1)  # another loop may follow the present one
                    yield from self._diagnose()
                yield from self._seek()
                more = yield from self._confirm_and_hold()
            except LossAlarm as alarm:
                yield from self._loss.answer(alarm, self._spending)
                alarmed = True
            self._done -= self._orders.reopen()
            warmup = 1

    def _is_nearly_over(self) -> bool:
        """Whether too little is left of the run for tuning to pay; what the user names is tried even so."""
        policy, left = self._orders.policy, self._world.job.steps_left()
        short = left is not None and left * self._step_ns < LEAST_LEFT_NS
        if policy.only or policy.dry_run:
            return False
        return all(self._world.ranks.exchange("what is left of the run", short))

    def _seek(self) -> Plan[None]:
        """Tries what the findings lead to, as long as something helps."""
        later = iter(LOOK_AGAIN_STEPS)
        while True:
            self._come()
            kept = measured = False
            while not kept and (ahead := self._ahead()):
                if not ahead[0].asked:
                    yield from self._confirm()  # what may have to wait long for its turn must not delay it
                if any(self._world.ranks.exchange("the budget of the run", self._is_used_up())):
                    break
                if not (yield from self._afford()):  # which may take many minutes
                    yield from self._orders.obey(self.state)
                    continue
                if self._orders.wait():
                    yield from self._orders.obey(self.state)
                    ahead = self._ahead()  # what is allowed may have changed
                if not ahead:
                    break
                trial = yield from self._try(ahead[0])
                kept, measured = trial.outcome is Outcome.KEPT, measured or trial.measured is not None
            if kept:
                if self._pays_to_ask():
                    yield from self._observe(max(each.action.settle_steps for each in self._changes.kept))
                    yield from self._diagnose()
                continue
            if measured or self._changes.kept or self._postponed or self._orders.policy.dry_run:
                break
            if not (yield from self._ask_later(next(later, None))):
                break

    def _pays_to_ask(self) -> bool:
        """Whether what was kept last wins enough for the rules to be asked again, or they may be anyway."""
        if all(name in self._done or not self._orders.policy.wanted(name) for name in self._world.actions):
            return False
        measured, left = self._changes.kept[-1].measured, self._world.job.steps_left()
        assert measured is not None
        won_ns = (measured.without_ns - measured.with_ns) * (self._step.number if left is None else left)
        pays = self._spending.pays_for_diagnosis(won_ns) or self._may_ask()
        return bool(self._world.ranks.exchange("whether the rules are asked", pays)[0])

    def _may_ask(self) -> bool:
        return self._world.clock() >= self._spending.next_diagnosis_ns()

    def _ask_later(self, steps: int | None) -> Plan[bool]:
        """Asks the rules again, after so many steps and when that is affordable.

        Returns:
            Whether it has: not where the run is over before, or something new may be tried now.
        """
        left = self._world.job.steps_left()
        too_late = left is not None and (
            left <= (steps or 0)
            or self._world.clock() + left * self._step_ns <= self._spending.next_diagnosis_ns()
        )
        if steps is None or self._world.ranks.exchange("when the rules are asked", too_late)[0]:
            return False
        self._enter("waiting")
        yield from self._orders.let_pass(steps, self.state, until_reopened=True)
        while not self._orders.reopened:
            commands = lambda: bool(self._world.commands)  # noqa: E731
            if (yield from until(self._world, "the next diagnosis", self._may_ask, commands)):
                yield from self._diagnose()
                return True
            yield from self._orders.obey(self.state)
        return False

    def _afford(self) -> Plan[bool]:
        """Waits until another trial is affordable; returns early, with `False`, for a command, and where
        none will be any more."""
        return (
            yield from until(
                self._world,
                "the budget",
                lambda: self._spending.affordable(self._world.clock(), self._left_ns()),
                lambda: bool(self._world.commands) or self._is_used_up(),
            )
        )

    def _left_ns(self) -> float | None:
        """What is left of the run; `None` where nobody knows, or the user names what is to be tried."""
        left = None if self._orders.policy.only else self._world.job.steps_left()
        return None if left is None else left * self._step_ns

    def _is_used_up(self) -> bool:
        """Whether this run has no time for another trial: waiting makes no more of it."""
        left_ns = self._left_ns()
        return left_ns is not None and not self._spending.affordable(self._world.clock(), left_ns)

    def _reuse(self, wanted: Sequence[Kept]) -> Plan[None]:
        at_start = {name for name, action in self._world.actions.items() if action.at_start}
        first = [each for each in wanted if each.action in at_start]
        if first and self._world.ranks.num == 1:  # the script has not begun: there is nobody to ask yet
            wanted = [each for each in wanted if each not in first]
            yield from self._put_in_force(first)
        self._enter("observing")
        for _ in range(WARMUP_STEPS):
            yield 1
        more = True
        while more:
            try:
                wanted = yield from self._put_in_force(wanted)
                more = yield from self._confirm_and_hold()
            except LossAlarm as alarm:
                yield from self._loss.answer(alarm, self._spending)

    def _put_in_force(self, wanted: Sequence[Kept]) -> Plan[list[Kept]]:
        """Puts settings in force without a trial; returns those for which it is too early."""
        self._enter("trying")
        self._loss.armed, early = False, []
        for each in wanted:
            first_step, reason = self._step.number, ""
            try:
                reason = yield from put_in_force(
                    self._world, self._orders.policy, self._changes, each, self._spending
                )
            except NotYet as refusal:
                early.append(each)
                reason = str(refusal)
            action = self._world.actions.get(each.action)
            trial = Trial(
                action=each.action,
                value=each.value,
                safety=action.safety if action else Safety.EXACT,
                outcome=Outcome.REFUSED if reason else Outcome.KEPT,
                reason=reason,
                first_step=first_step,
                settings={} if reason else self._changes.kept[-1].settings,
            )
            if each in early:
                self._postponed[each.action] = trial
            else:
                self._tell(trial)
        yield from settle(self._changes.kept)
        self._loss.armed = True
        return early

    def _observe(self, warmup: int) -> Plan[None]:
        """Lets the script run; notes the first step that counts, and how long they take."""
        self._enter("observing")
        for _ in range(max(warmup, 1)):
            yield 1
        self._first, begun = self._step.number, self._world.clock()
        yield from self._orders.let_pass(OBSERVED_STEPS, self.state)
        yield from until(self._world, "the observation", lambda: self._world.clock() - begun >= OBSERVED_NS)
        self._step_ns = (self._world.clock() - begun) / (self._step.number - self._first)

    def _diagnose(self) -> Plan[None]:
        """Asks the rules, on rank 0 alone: its folder holds what all ranks of the machine have recorded."""
        found: list[Lead] | None = []
        if self._world.ranks.rank == 0:
            self._diagnosis, found = self._world.diagnose(self._first), None

        def known() -> bool:
            nonlocal found
            if found is None and self._diagnosis is not None:
                found = self._diagnosis.leads()
            return found is not None

        in_force = [installed.name for installed in self._changes.kept]
        yield from until(self._world, "the diagnosis", known)
        if self._diagnosis is not None:
            self._spending.diagnosed(self._diagnosis.cost_ns)
        self._diagnosis = None
        told = self._world.ranks.exchange("the findings", [asdict(lead) for lead in found or ()])
        rules = [lead["rule"] for lead in told[0]]
        self._world.tell("diagnosed", {"step": self._step.number, "rules": rules, "in_force": in_force})
        self._leads, self._asked_with = [Lead.from_record(record) for record in told[0]], in_force

    def _ahead(self) -> list[Candidate]:
        in_force = [installed.name for installed in self._changes.kept]
        leads, policy = self._leads or [], self._orders.policy
        return candidates(leads, self._world.actions, policy, self._done, in_force, self._asked_with)

    def _try(self, candidate: Candidate) -> Plan[Trial]:
        """Tries one action."""
        self._done.add(candidate.name)
        measured = [each.measured.with_ns for each in self._changes.kept if each.measured is not None]
        self._attempt = Attempt(
            self._world,
            self._orders.policy,
            self._changes,
            self._spending,
            lambda: self._step.number,
            min([self._step_ns, *measured]),
        )
        trial = yield from self._attempt.run(candidate, lambda: self._enter("trying"))
        if self._attempt.too_dear:
            self._too_dear.add(candidate.name)
        self._attempt = None
        if trial.outcome is Outcome.NOT_ALLOWED:
            self._orders.without_leave[candidate.name] = trial.safety
        if trial.outcome is Outcome.NOT_YET:
            if candidate.asked:
                self._postponed[candidate.name] = replace(trial, outcome=Outcome.REFUSED)
        elif candidate.asked or trial.measured is not None or trial.outcome not in NEVER_BEGUN:
            self._tell(trial)
        return trial

    def _confirm_and_hold(self) -> Plan[bool]:
        """Measures what is kept, all together: at once, and then now and again.

        Returns:
            Whether there may be something new to try; else nothing is left to be done.
        """
        if self._orders.reopened:
            return True
        yield from self._confirm()
        while self._changes.kept or self._postponed:
            self._enter("holding" if self._changes.kept else "waiting")
            begun = self._step.number
            while self._step.number < begun + self._recheck_steps():
                yield from self._orders.let_pass(LOOK_STEPS, self.state, until_reopened=True)
                self._loss.heed()
                drop_what_must_go(self._world, self._changes)
                if self._orders.reopened or self._looks_again():
                    return True
            if self._changes.kept:
                self._lost = yield from self._measure_kept(
                    "recheck", RECHECK_PAIRS, lambda found: found.speedup > LOST
                )
                self._confirmed = list(self._changes.kept)
        return False

    def _recheck_steps(self) -> int:
        """Returns the steps between two measurements of what is kept, by how many the last one has lost."""
        same = self._changes.kept == self._confirmed
        return max(RECHECK_STEPS, round(self._lost / RECHECK_SHARE) if same else 0)

    def _confirm(self) -> Plan[None]:
        """Measures what is kept, all together, unless that was done."""
        kept = list(self._changes.kept)
        if kept and kept != self._confirmed:
            self._enter("confirming")
            lost = yield from self._measure_kept("confirmation", CONFIRM_PAIRS, lambda found: found.low > 1)
            self._lost = round(lost * RECHECK_PAIRS / CONFIRM_PAIRS)
            self._confirmed = list(self._changes.kept)

    def _looks_again(self) -> bool:
        """Whether enough steps have passed for the findings to be others, or a postponed action can be
        tried now."""
        if self._orders.policy.dry_run:
            return False
        come = self._come()
        due = self._orders.tries and self._step.number >= self._look_at
        if due and self._world.ranks.exchange("whether the rules are asked", self._may_ask())[0]:
            self._look_at *= LOOK_LATER
            self._leads = None
            self._too_dear.clear()
        else:
            due = False
        return due or come

    def _come(self) -> bool:
        """Whether actions have come to be possible that it was too early for; they may be tried now."""
        waiting = [name for name in self._postponed if name not in self._too_dear]
        with self._spending.charged(self._world.clock):
            come = [name for name in waiting if not is_early(self._world, name)]
        for name in come:
            del self._postponed[name]
        self._done -= set(come)
        return bool(come)

    def _measure_kept(self, kind: str, pairs: int, enough: Callable[[Measured], bool]) -> Plan[int]:
        return (
            yield from measure_kept(
                self._world,
                self._changes,
                self._spending,
                kind=kind,
                pairs=(pairs, DOUBT_PAIRS),
                enough=enough,
            )
        )

    # -- the end

    def _failed(self, error: str) -> None:
        """Something of ours failed where the other ranks do not know of it."""
        if self._world.ranks.num == 1:
            self._end(error)
        elif self.state != "frozen":
            self._freeze("something of ours failed", error)
        else:
            self._world.tell("tuning_error", {"error": error})
            self._world.stop()

    def _freeze(self, reason: str, error: str = "") -> None:
        """Leaves in force what all ranks must have alike: no other would undo it at the same step. The rest
        of what was only tried is undone."""
        self._world.ranks.leave(reason)
        self._cut_off("tuning stopped")
        self._plan = None
        self._close_diagnosis()
        for text in filter(None, [error, *self._changes.undo_trial()]):
            self._world.tell("tuning_error", {"error": text})
        self._world.tell("frozen", {"reason": reason, "in_force": self._changes.in_force()})
        self._enter("frozen")
        self._orders.refuse(f"tuning has stopped: {reason}")

    def _end(self, error: str) -> None:
        """Undoes everything in reverse order, whatever fails, and leaves the job alone."""
        self._plan = None
        for text in filter(None, [error, *self._changes.undo()]):
            self._world.tell("tuning_error", {"error": text})
        self._cut_off("tuning failed" if error else "tuning ended")
        self._close_diagnosis()
        self._enter("ended")
        self._orders.refuse("tuning has ended")
        self._world.stop()

    def _close_diagnosis(self) -> None:
        if self._diagnosis is not None:
            self._diagnosis.close()
            self._diagnosis = None

    def _cut_off(self, why: str) -> None:
        trial = self._attempt.cut_off(why) if self._attempt is not None else None
        self._attempt = None
        for each in filter(None, [trial, *self._postponed.values()]):
            self._tell(each)
        self._postponed.clear()

    # -- telling

    def _may_harm(self) -> bool:
        """Whether something that changes what training computes may come to be in force."""
        policy = self._orders.policy
        return not policy.dry_run and any(map(policy.allows, ASKED_FOR))

    def _enter(self, state: str) -> None:
        if state != self.state:
            self.state = state
            self._world.tell("tuning", {"state": state, "step": self._step.number})

    def _tell(self, trial: Trial) -> None:
        self._world.tell("trial", trial.as_record())
