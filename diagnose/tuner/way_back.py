"""The way back for the weights, where the loss goes wrong in the trial of what may harm the training."""

from __future__ import annotations

from diagnose.actions.base import Action, CannotApply
from diagnose.core.trial import ASKED_FOR, Outcome
from diagnose.tuner.agreement import switch, together
from diagnose.tuner.changes import Changes
from diagnose.tuner.loss_trend import LossAlarm
from diagnose.tuner.preparing import UNCHECKED, numerics_allow
from diagnose.tuner.world import Course, Plan, Snapshot, World


class WayBack:
    """What training had come to on every rank before one trial.

    Args:
        changes: What is in force.
        course: Where tuning stands.

    Attributes:
        missing: Why the weights could not be kept, in words; empty if they were.
    """

    def __init__(self, world: World, changes: Changes, course: Course) -> None:
        self._world = world
        self._changes = changes
        self._course = course
        self._snapshot: Snapshot | None = None
        self._step = course.step.number
        self.missing = ""
        made: list[Snapshot] = []
        keep = lambda: made.append(world.snapshot(world.job))  # noqa: E731
        try:
            with course.spending.charged(world.clock):
                together(world, "keeping the weights", keep, dear=True)
            self._snapshot = made[0]
        except CannotApply as refusal:
            self.missing = f"tried without a way back for the weights: {refusal}"

    def take(self, action: Action, alarm: LossAlarm) -> Plan[tuple[Outcome, str]]:
        """Takes the change under trial out. The weights are put back where the loss is no number any more,
        or the change fails its numerics check now: a loss also rises by itself.

        Returns:
            What became of the trial, and why.
        """
        world, tried = self._world, self._changes.tried
        snapshot, self._snapshot = self._snapshot, None
        world.loss.alarm, world.loss.paused = "", True
        failed = ""
        if not alarm.fatal and action.touches not in UNCHECKED:
            suspect = next((each for each in tried if each.on), tried[-1])
            suspect.instead = ()  # what it excludes comes back when it is out
            switch(world, [suspect], False)
            try:
                passed = yield from numerics_allow(world, suspect, self._course.spending)
            except CannotApply as refusal:
                failed, passed = str(refusal), ""
            if passed:
                self._changes.remove(*tried)
                world.loss.restart()
                if any(each.action.safety in ASKED_FOR for each in self._changes.kept):
                    world.loss.alarm = str(alarm)  # one of them may be to blame
                return Outcome.CANNOT_TELL, f"{alarm}, which is not its doing: it {passed}"
        self._changes.remove(*tried)
        if not (alarm.fatal or failed):
            world.loss.restart()
            own = "that may be the script's own, and the weights are left as they are"
            return Outcome.HARMED, f"{alarm}; {own}"
        for _ in range(action.settle_steps):  # what it has left behind, as batches made ahead
            yield 1
        back = self._restored(snapshot)
        world.loss.restart()
        why = f"{alarm}, and {failed}" if failed else str(alarm)
        return Outcome.HARMED, f"{why}; {back}"

    def _restored(self, snapshot: Snapshot | None) -> str:
        """Puts the weights back on every rank; returns in words what they are."""
        if snapshot is None:
            return "the weights are as they came to be: there was no way back"
        world = self._world
        try:
            together(world, "looking at the weights", snapshot.check)
            restore = lambda: snapshot.restore(world.job)  # noqa: E731
            together(world, "putting the weights back", restore, dear=True, back=True)
        except CannotApply as refusal:
            return f"the weights could not be put back: {refusal}"
        return f"weights and optimizer state are those of step {self._step} again"
