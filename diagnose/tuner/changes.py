"""What is in force on a job and what is being tried there: the same on every rank."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from diagnose.actions.base import Action, CannotApply
from diagnose.core.trial import Safety
from diagnose.tuner.agreement import switch, together, whose
from diagnose.tuner.installed import Installed
from diagnose.tuner.world import World


class Changes:
    """The actions prepared on a job.

    Attributes:
        kept: Those that helped, in the order in which they were put in.
        tried: Those under trial, likewise.
        over: Names of those that were kept until there was nothing left that they worked on.
    """

    def __init__(self, world: World) -> None:
        self.kept: list[Installed] = []
        self.tried: list[Installed] = []
        self.over: set[str] = set()
        self._world = world

    def install(self, name: str, action: Action, value: int | None) -> Installed:
        """Prepares an action on every rank, for a trial; it is not in force yet.

        Raises:
            CannotApply, RankFailed, RanksLost: See `agreement.together`.
        """

        before = list(self.tried)

        def work() -> tuple[int, int, str]:
            self.tried.append(Installed(name, action, self._world.job, value, self._on))
            return action.settle_steps, action.window_steps, self.tried[-1].alike()

        try:
            *needed, alike = zip(*together(self._world, f"preparing {name}", work, dear=True), strict=True)
            for rank, words in enumerate(alike):
                if words != alike[0]:
                    raise CannotApply(f"ranks differ: rank 0: {alike[0]}; rank {rank}: {words}")
        except CannotApply:
            # Also on the ranks that refused, and have nothing to undo: all make the same exchanges.
            self._undo(name, [each for each in self.tried if each not in before])
            raise
        action.settle_steps, action.window_steps = map(max, needed)
        return self.tried[-1]

    def keep(self, installed: Installed) -> None:
        """What was tried stays."""
        self.tried.remove(installed)
        self.kept.append(installed)

    def remove(self, *changes: Installed) -> None:
        """Takes changes back and out on every rank, the last one first.

        Raises:
            RankFailed, RanksLost: See `agreement.together`.
            RuntimeError: If a job of one process is not as it was before.
        """
        if changes:
            self._undo(", ".join(each.name for each in changes), changes)

    def _undo(self, names: str, changes: Sequence[Installed]) -> None:
        def work() -> None:
            for installed in reversed(changes):
                for own in (self.kept, self.tried):
                    if installed in own:
                        own.remove(installed)
                installed.remove()

        together(self._world, f"undoing {names}", work, dear=True, back=True)

    def put_back(self) -> None:
        """Puts what is kept in force again; drops what gives itself up, and lets go of what is over."""
        for installed in list(self.kept):
            try:
                switch(self._world, [installed], True)
            except CannotApply as refusal:
                if any(self._world.ranks.exchange("what is over", installed.is_over())):
                    self._ended(installed)
                else:
                    self.drop(str(refusal), installed)

    def drop(self, reason: str, *changes: Installed) -> None:
        """Takes out what was kept, and tells why."""
        self.remove(*changes)
        for installed in changes:
            self._world.tell("dropped", {"action": installed.name, "reason": reason})

    def let_go(self) -> None:
        """Takes out what is over on some rank, as there it could not be put in force again, and what one
        has found not to be fit to stay."""
        asked = [each for each in self.kept if each.action.hangs_on or may_give_up(each.action)]
        if not asked:
            return
        look = lambda: [[each.is_over(), each.why_not_stay()] for each in asked]  # noqa: E731
        try:
            told = together(self._world, "looking after what is kept", look)
        except CannotApply:  # for lack of memory: it is looked after again soon
            return
        for installed, *on_ranks in reversed(list(zip(asked, *told, strict=True))):
            said = {rank: reason for rank, (_, reason) in enumerate(on_ranks) if reason}
            if any(is_over for is_over, _ in on_ranks):
                self._ended(installed)
            elif said:
                self.drop(whose(said, len(on_ranks)), installed)

    def _ended(self, over: Installed) -> None:
        """Takes out what is over."""
        self.remove(over)
        self.over.add(over.name)
        self._world.tell("over", {"action": over.name})

    def in_force(self) -> list[str]:
        """Returns the names of the actions in force, tried ones among them."""
        return [installed.name for installed in self._on()]

    def _on(self) -> list[Installed]:
        return [installed for installed in [*self.kept, *self.tried] if installed.on]

    def undo(self) -> list[str]:
        """Takes everything back and out on this rank, whatever fails; returns what did."""
        return self._take_out([*self.kept, *self.tried])

    def undo_trial(self) -> list[str]:
        """Likewise what is only tried, where a rank may do that by itself."""
        return self._take_out([each for each in self.tried if not needs_others(each.action)])

    def _take_out(self, changes: Sequence[Installed]) -> list[str]:
        errors: list[str] = []
        interrupt: BaseException | None = None
        for installed in reversed(changes):
            try:
                installed.remove()
            except Exception:  # noqa: BLE001 (the others must still be undone)
                errors.append(f"undoing {installed.name}: {traceback.format_exc(limit=-3).strip()}")
            except BaseException as error:  # noqa: BLE001 (likewise; it is raised in the end)
                interrupt = error
        self.kept = [each for each in self.kept if each not in changes]
        self.tried = [each for each in self.tried if each not in changes]
        if interrupt is not None:
            raise interrupt
        return errors


def may_give_up(action: Action) -> bool:
    """Whether it is one that is asked why it must not stay."""
    return type(action).why_not_stay is not Action.why_not_stay


def needs_others(action: Action) -> bool:
    """Whether all ranks must have an action in force, or none: else what they send each other does not fit,
    or their weights, each updated in its own way, come to differ."""
    if action.touches == "nothing":
        return action.safety is not Safety.EXACT
    return action.touches != "model"
