"""Tunes a running job: finds what to try, measures it on the job itself, keeps what helps, undoes the rest.

Everything here runs on the training thread, between two steps: the plan is a generator that is resumed at a
step's end with the time the step took. In a job of several ranks each runs the same plan, and waits
for the others where they decide something together; see `agreement`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import Any

from diagnose.core.trial import ASKED_FOR
from diagnose.tuner.agreement import RankFailed, RanksLost
from diagnose.tuner.asking import Asking
from diagnose.tuner.changes import Changes
from diagnose.tuner.holding import Holding
from diagnose.tuner.kept import Kept
from diagnose.tuner.loss_trend import LossAlarm
from diagnose.tuner.loss_watch import LossWatch
from diagnose.tuner.orders import Orders
from diagnose.tuner.policy import Policy
from diagnose.tuner.reusing import put_in_force
from diagnose.tuner.seeking import Seeking
from diagnose.tuner.world import Course, Plan, Step, World

WARMUP_STEPS = 5

FROZEN_STEPS = 64
"""Where tuning has stopped, what is in force is looked after so often at least."""


class Controller:
    """One process's tuning.

    Args:
        policy: What the user allows.
        reuse: Settings of an earlier run to put in force at once, instead of trials.

    Attributes:
        rests_until: `boundary` need not be called before so many steps have finished, unless there is a
            command.
    """

    def __init__(self, world: World, policy: Policy, reuse: Sequence[Kept] | None = None) -> None:
        self._world = world
        self._course = course = Course(world)
        self._changes = changes = Changes(world)
        self._orders = orders = Orders(world, policy, changes, course)
        orders.tries = reuse is None
        self._loss = LossWatch(world, changes, orders)
        self._asking = Asking(world, changes, orders, course)
        self._holding = Holding(world, changes, orders, self._loss, course)
        self._seeking = Seeking(world, changes, orders, course, self._asking, self._holding)
        self._resumed_ns = course.spending.begun_ns
        self.rests_until = 0
        self._plan: Plan[None] | None = self._tune() if reuse is None else self._reuse(reuse)
        next(self._plan)

    @property
    def state(self) -> str:
        """What is being done: `observing`, `trying`, `confirming`, `holding`, `waiting` (for something new
        to try, with nothing kept), `paused`, `frozen`, `ended`."""
        return self._course.state

    # -- what the process calls

    def rests(self, number: int) -> bool:
        """A step of the script has ended: returns whether `boundary` need not be called for it. Cheap: does
        only what is due after each step. Raises no `Exception`."""
        if number >= self.rests_until or self._world.commands:
            return False
        self._guarded(self._call_on_step)
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
        self._guarded(self._go_on, number, aside, begins, num_samples)
        self._resumed_ns = self._world.clock()
        self._world.pauses.mark()

    def _go_on(self, number: int, aside: bool, begins: bool, num_samples: int) -> None:
        self._call_on_step()
        if self._plan is None:
            self._loss.read()
            self.rests_until = number + FROZEN_STEPS
            return
        time_ns, before = self._world.clock() - self._resumed_ns, self._course.step.number
        passed = max(1, number - before)
        self._course.step = Step(
            number=number,
            time_ns=time_ns,
            aside=aside,
            begins=begins,
            num_samples=num_samples,
            passed=passed,
            # What was collected before the first step ended is the start of the script.
            paused_ns=self._world.pauses.steps_ended(time_ns, passed) if before else 0,
        )
        self._course.looks += 1
        alarm = self._loss.step_ended()
        steps = self._plan.throw(alarm) if alarm is not None else self._plan.send(self._course.step)
        self.rests_until = 0 if self._loss.watches() else number + steps

    def _call_on_step(self) -> None:
        for call in list(self._world.job.on_step):
            call()

    def _guarded(self, work: Callable[..., None], *args: Any) -> None:
        """Does something between two steps; what fails in it ends or freezes the tuning."""
        try:
            work(*args)
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

    def finish(self) -> None:
        """The script ends, however it does: everything is undone. Raises no `Exception`."""
        self._seeking.cut_off("the script ended")
        if self.state != "ended":
            self._world.ranks.leave("its script has ended")
            self._end("")

    # -- the plan

    def _tune(self) -> Plan[None]:
        asking, warmup, more, observes = self._asking, WARMUP_STEPS, True, False
        while more:
            try:
                if asking.leads is None or observes:
                    observes = False
                    yield from asking.observe(warmup)
                if asking.leads is None:
                    while warmup == WARMUP_STEPS and asking.is_nearly_over():
                        yield from asking.observe(1)  # another loop may follow the present one
                    yield from asking.diagnose()
                yield from self._seeking.seek()
                more = yield from self._hold()
            except LossAlarm as alarm:
                yield from self._loss.answer(alarm, self._course.spending)
                observes = True
            if again := self._orders.reopen():
                self._seeking.done -= again
                observes = True  # what is tried then is set against the loss before it
            warmup = 1

    def _reuse(self, wanted: Sequence[Kept]) -> Plan[None]:
        at_start = {name for name, action in self._world.actions.items() if action.at_start}
        first = [each for each in wanted if each.action in at_start]
        if first and self._world.ranks.num == 1:  # the script has not begun: there is nobody to ask yet
            wanted = [each for each in wanted if each not in first]
            yield from self._put_in_force(first)
        self._course.enter("observing")
        for _ in range(WARMUP_STEPS):
            yield 1
        asked, more = list(wanted), True
        while more:
            try:
                wanted = yield from self._put_in_force(wanted)
                more = yield from self._hold()
                if self._seeking.is_trained_again():  # what the file names is wanted for that, too
                    wanted = [*wanted, *(each for each in asked if each.action in self._changes.over)]
                    self._changes.over.clear()
            except LossAlarm as alarm:
                yield from self._loss.answer(alarm, self._course.spending)

    def _put_in_force(self, wanted: Sequence[Kept]) -> Plan[list[Kept]]:
        self._loss.armed = False
        early = yield from put_in_force(
            self._world, self._orders.policy, self._changes, self._course, wanted, self._seeking.postponed
        )
        self._loss.armed = True
        return early

    def _hold(self) -> Plan[bool]:
        postponed = self._seeking.postponed
        self._loss.expects = any(self._world.actions[name].safety in ASKED_FOR for name in postponed)
        try:
            return (yield from self._holding.hold(postponed, self._seeking.looks_again))
        finally:
            self._loss.expects = True

    # -- the end

    def _failed(self, error: str) -> None:
        """Something of ours failed where the other ranks do not know of it."""
        if self._world.ranks.num == 1:
            self._world.look()  # else nobody could tell whether all is undone
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
        self._seeking.cut_off("tuning stopped")
        self._plan = None
        self._asking.close()
        for text in filter(None, [error, *self._changes.undo_trial()]):
            self._world.tell("tuning_error", {"error": text})
        self._world.tell("frozen", {"reason": reason, "in_force": self._changes.in_force()})
        self._course.enter("frozen")
        self._orders.refuse(f"tuning has stopped: {reason}")

    def _end(self, error: str) -> None:
        """Undoes everything in reverse order, whatever fails, and leaves the job alone."""
        self._plan = None
        for text in filter(None, [error, *self._changes.undo()]):
            self._world.tell("tuning_error", {"error": text})
        self._seeking.cut_off("tuning failed" if error else "tuning ended")
        self._asking.close()
        self._course.enter("ended")
        self._orders.refuse("tuning has ended")
        self._world.stop()
