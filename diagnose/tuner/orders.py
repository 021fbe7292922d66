"""What a person asks of the tuner while it is at work, and what it keeps to since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import chain

from diagnose.core.command import Command
from diagnose.core.trial import Safety
from diagnose.tuner.agreement import heed_loss, loss_now, rest
from diagnose.tuner.changes import Changes
from diagnose.tuner.installed import Installed
from diagnose.tuner.policy import Policy
from diagnose.tuner.world import Course, Plan, World

PAUSED_STEPS = 50
"""While tuning is paused, ranks ask each other after so many steps whether it still is."""

BY_HAND = "asked for in the dashboard"


class Orders:
    """The commands of one process's tuning. They are obeyed between two trials, never in the middle of one.

    Args:
        policy: What the user allowed at first.
        changes: What is in force.
        course: Where tuning stands.

    Attributes:
        policy: What the user allows now.
        tries: Whether there are trials at all.
        paused: Whether nothing new may be begun.
        reopened: The classes allowed since `reopen` was called last.
        without_leave: Actions that were not tried because their class was not allowed.
    """

    def __init__(self, world: World, policy: Policy, changes: Changes, course: Course) -> None:
        self.policy = policy
        self.tries = True
        self.paused = False
        self.reopened: set[Safety] = set()
        self.without_leave: dict[str, Safety] = {}
        self._world = world
        self._changes = changes
        self._course = course

    def wait(self) -> bool:
        """Whether tuning is paused, or a command may be waiting. Asked after each step: costs a look at an
        empty queue."""
        return self.paused or bool(self._world.commands) or self._world.ranks.num > 1

    def _is_told(self) -> bool:
        """Whether a command waits that this process can obey by itself."""
        return bool(self._world.commands) and self._world.ranks.num == 1

    def let_pass(self, steps: int, *, until_reopened: bool = False) -> Plan[None]:
        """Lets steps pass, and obeys in between; in a job of several ranks, where each question to the
        others costs milliseconds, only after them.

        Args:
            until_reopened: Return when something is allowed that was not.
        """
        left = steps
        while left > 0:
            left -= (yield left).passed
            if self.wait() and (self._world.ranks.num == 1 or left <= 0):
                yield from self.obey()
            if until_reopened and self.reopened:
                return

    def obey(self) -> Plan[None]:
        """Does what was asked for, and nothing else as long as tuning is paused; then it does what it did.

        Raises:
            RankFailed, RanksLost, RuntimeError: See `Changes.remove`.
            LossAlarm: If a rank's loss went wrong while tuning was paused.
        """
        self._obey()
        state, rested = self._course.state, False
        while self.paused:
            if not rested:
                self._course.enter("paused")
                rested = True
            yield from rest(PAUSED_STEPS, self._is_told)
            self._obey()
            if self._world.ranks.num > 1:
                heed_loss(self._world.ranks.exchange("the loss", loss_now(self._world)))
        if rested:
            self._course.enter(state)

    def reopen(self) -> set[str]:
        """Returns the actions that waited for leave and have it now."""
        allowed, self.reopened = self.reopened, set()
        again = {name for name, safety in self.without_leave.items() if safety in allowed}
        for name in again:
            del self.without_leave[name]
        return again

    def _obey(self) -> None:
        asked = []
        while self._world.commands:
            asked.append(asdict(self._world.commands.popleft()))
        # Processes that the script starts by itself share one folder: any of them may have found the file.
        for record in chain.from_iterable(self._world.ranks.exchange("commands", asked)):
            command = Command(**record)
            self._tell(command, DO[command.command](self, command.argument))

    def refuse(self, reason: str) -> None:
        """Says of all that still waits why it will not be done."""
        while self._world.commands:
            self._tell(self._world.commands.popleft(), reason)

    def _tell(self, command: Command, refusal: str) -> None:
        state = "refused" if refusal else "done"
        self._world.tell("command", {**asdict(command), "state": state, "reason": refusal})

    # -- one for each command; each returns why it was not done, or nothing

    def _pause(self, _: str) -> str:
        if self.paused:
            return "tuning is paused already"
        self.paused = True
        return ""

    def _resume(self, _: str) -> str:
        if not self.paused:
            return "tuning is not paused"
        self.paused = False
        return ""

    def _allow(self, argument: str) -> str:
        safety = Safety(argument)
        if not self.tries:
            return "this run tries nothing: it uses what an earlier one found"
        if self.policy.allows(safety):
            return f"{argument} is allowed already"
        self.policy = replace(
            self.policy,
            allowed=self.policy.allowed | {safety},
            forbidden=self.policy.forbidden - {safety},
        )
        self.reopened.add(safety)
        return ""

    def _forbid(self, argument: str) -> str:
        safety = Safety(argument)
        if not self.policy.allows(safety):
            return f"{argument} is not allowed anyway"
        self.policy = replace(
            self.policy,
            allowed=self.policy.allowed - {safety},
            forbidden=self.policy.forbidden | {safety},
        )
        gone = self._undo_those(lambda each: each.action.safety is safety, f"{argument} was forbidden")
        self.without_leave.update(dict.fromkeys(gone, safety))
        return ""

    def _undo(self, argument: str) -> str:
        if all(installed.name != argument for installed in self._changes.kept):
            return f"{argument} is not in force"
        self.policy = replace(self.policy, skip=self.policy.skip | {argument})
        self._undo_those(lambda each: each.name == argument, BY_HAND)
        return ""

    def _undo_those(self, chosen: Callable[[Installed], bool], reason: str) -> list[str]:
        gone = [each for each in self._changes.kept if chosen(each)]
        self._changes.drop(reason, *gone)
        return [installed.name for installed in gone]


DO: dict[str, Callable[[Orders, str], str]] = {
    "pause-tuning": Orders._pause,
    "resume-tuning": Orders._resume,
    "allow": Orders._allow,
    "forbid": Orders._forbid,
    "undo": Orders._undo,
}
"""The tuner's part of `core.command.COMMANDS`."""
