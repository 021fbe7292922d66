"""Watches the training loss while a change is in force that may harm it, and looks into an alarm."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.actions.base import CannotApply
from diagnose.core.trial import ASKED_FOR
from diagnose.tuner.agreement import heed_loss, loss_now, switch
from diagnose.tuner.changes import Changes
from diagnose.tuner.installed import Installed
from diagnose.tuner.loss_trend import LossAlarm
from diagnose.tuner.orders import Orders
from diagnose.tuner.preparing import UNCHECKED, numerics_allow
from diagnose.tuner.world import Plan, Spending, World


class LossWatch:
    """The watch of one process.

    Args:
        changes: What is in force.
        orders: Whether there may be such a change at all: the loss before it is what it is compared with.

    Attributes:
        armed: Whether somebody is ready to catch an alarm.
        expects: Whether the next thing to be tried may be such a change. Until something is, nobody needs
            the loss of each step where nothing of the kind is in force.
    """

    def __init__(self, world: World, changes: Changes, orders: Orders) -> None:
        self._world = world
        self._changes = changes
        self._orders = orders
        self.armed = True
        self.expects = True
        self._begun = self._watched = False

    def suspects(self) -> list[Installed]:
        """Returns what is kept or tried and may harm the training; the same on every rank."""
        installed = [*self._changes.kept, *self._changes.tried]
        return [each for each in installed if each.action.safety in ASKED_FOR]

    def watches(self) -> bool:
        """Whether the loss of each step matters."""
        return bool(self.suspects()) or (self.expects and self._orders.policy.may_harm())

    def read(self) -> None:
        """Takes note of the loss of a step, to be shown: on a CPU, where that costs no copy. Where somebody
        has asked for losses before they are noted anyway, and would pile up."""
        if self._begun or self._world.job.device == "cpu":
            self._told()

    def _told(self) -> Sequence[float]:
        self._begun = True
        return self._world.losses()

    def step_ended(self) -> LossAlarm | None:
        """Takes note of the loss; returns an alarm that this process can heed by itself."""
        trend, suspects, watched = self._world.loss, self.suspects(), self.watches()
        again, self._watched = watched and not self._watched, watched
        if not watched:
            self.read()
            return None
        if again:  # what the loss was when it was watched last is long ago
            trend.restart()
        for loss in self._told():
            trend.add(loss)
        if not trend.alarm:
            return None
        if not suspects:  # the script's own affair
            if trend.fatal:
                trend.fault_is_own()
            trend.restart()
            return None
        by_itself = self.armed and self._world.ranks.num == 1
        return LossAlarm(trend.alarm, trend.fatal) if by_itself else None

    def heed(self) -> None:
        """Asks the other ranks.

        Raises:
            LossAlarm: If one of them has seen something.
        """
        if self._world.ranks.num > 1 and self.suspects():
            heed_loss(self._world.ranks.exchange("the loss", loss_now(self._world)))

    def answer(self, alarm: LossAlarm, spending: Spending) -> Plan[None]:
        """Undoes what is to blame: what fails its numerics check now, and what has none. Where the loss is
        no number any more it is all that may harm the training.

        Raises:
            RankFailed, RanksLost, RuntimeError: See `Changes.remove`.
        """
        world, changes = self._world, self._changes
        self.armed = False
        changes.let_go()  # of a model that the script has just begun the loss is another
        cleared = []
        for suspect in reversed([each for each in self.suspects() if each in changes.kept]):
            reason = str(alarm)
            if not alarm.fatal and suspect.action.touches not in UNCHECKED:
                try:
                    switch(world, [suspect], False)
                    yield from numerics_allow(world, suspect, spending)
                    switch(world, [suspect], True)
                    cleared.append(suspect.name)
                    continue
                except CannotApply as refusal:
                    reason = f"{alarm}, and {refusal}"
            changes.drop(reason, suspect)
        changes.put_back()  # some may have been off, to be measured
        world.loss.restart()
        self.armed = True
        world.tell("loss_alarm", {"reason": str(alarm), "cleared": cleared})
