"""An action on a live job: prepared once, switched on and off, and taken out without a trace."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.job import Job
from diagnose.core.trial import Measured


class Installed:
    """One action with one setting, prepared on a job and not yet in force.

    Args:
        job: What it works on.
        value: Its setting.
        in_force: Returns the other actions that are in force.

    Attributes:
        on: Whether it is in force.
        times: How often it was put in force.
        instead: Others that make way while it is in force, and come back when it is taken back.
        measured: What its trial showed.
        slowed: How many times as long steps take while it is only prepared; 1 where that is about as long.
        settings: See `Action.settings`.

    Raises:
        CannotApply: If it cannot be prepared; nothing was changed.
    """

    def __init__(
        self,
        name: str,
        action: Action,
        job: Job,
        value: int | None,
        in_force: Callable[[], Sequence[Installed]] = tuple,
    ) -> None:
        self.name = name
        self.action = action
        self.value = value
        self.on = False
        self.times = 0
        self.instead: Sequence[Installed] = ()
        self.measured: Measured | None = None
        self.slowed = 1.0
        self._job = job
        self._in_force = in_force
        self._beside = [(other, other.times) for other in in_force()]
        self.settings: Mapping[str, str] = action.settings(job, value)
        self._before = action.state(job)
        self._among = [weakref.ref(each) for each in (*job.models, *job.optimizers)]
        self._num_iterators = len(job.iterators)
        self._hung_on = [alive(job, kind) for kind in action.hangs_on]
        self._preparation = ExitStack()
        self._prepared: Any = self._preparation.enter_context(action.prepare(job, value))
        self._application = ExitStack()

    @property
    def actions(self) -> list[Action]:
        """Its action, and those that make way for it."""
        return [self.action, *(each.action for each in self.instead)]

    def context(self) -> AbstractContextManager[None]:
        """Returns the change as a context, for whoever puts it in force and takes it back himself.

        Raises:
            NotYet: See `refuse_over`.
        """
        self.refuse_over()
        return self.action.apply(self._job, self._prepared)

    def switch(self, on: bool) -> None:
        """Puts the action in force, or takes it back; nothing if it is so already.

        Raises:
            CannotApply: If it cannot be put in force; nothing was changed.
        """
        if on and not self.on:
            for other in reversed(self.instead):
                other.switch(False)
            try:
                self._application.enter_context(self.context())
            except CannotApply:
                for other in self.instead:
                    other.switch(True)
                raise
            self.on = True
            self.times += 1
        elif not on:
            if self.on:
                self.on = False  # first: a way back that fails half-way is not gone a second time
                self._application.close()
            for other in self.instead:
                other.switch(True)

    def is_over(self) -> bool:
        """Whether nothing is left of what it was hung on: the script has done with that training."""
        return any(hung and all(each() is None for each in hung) for hung in self._hung_on)

    def refuse_over(self) -> None:
        """Raises `NotYet` once it is over: nobody has compared what else the script may train by now. To do
        nothing instead would measure nothing, and in a job of ranks on one of them only."""
        if self.is_over():
            raise NotYet("the script has done with what it was prepared on")

    def why_not_stay(self) -> str:
        return self.action.why_not_stay(self._prepared)

    def alike(self) -> str:
        return self.action.alike(self._prepared)

    def remove(self) -> None:
        """Takes the action back and out. What has made way for it is not put in force again.

        Raises:
            RuntimeError: If the job is not as it was before.
        """
        self.instead = ()
        try:
            self.switch(False)
        finally:
            self._preparation.close()
        beside = [(other, other.times) for other in self._in_force()]
        if self._is_among_the_same() and beside == self._beside:
            self.action.verify_undone(self._job, self._before)

    def _is_among_the_same(self) -> bool:
        """Whether the job has the models and optimizers that it had, and as many iterators, which every
        epoch makes anew: at the script's end some are gone, and its state is then that of others. So it is
        while other actions are in force than were then, or the same once more: what they hang into the job
        is made anew."""
        now = (*self._job.models, *self._job.optimizers)
        same = len(now) == len(self._among) and len(self._job.iterators) == self._num_iterators
        return same and all(then() is each for then, each in zip(self._among, now, strict=True))


def alive(job: Job, kind: str) -> list[weakref.ref[Any]]:
    """Returns references to what of a job an action may be hung on, see `Action.hangs_on`: not to losses,
    which live on."""
    found = job.optimizers if kind == "optimizers" else _with_weights(job.models)
    if kind == "blocks":
        found = [part for model in found for part in _with_weights(model.children()) or [model]]
    return list(map(weakref.ref, found))


def _with_weights(modules: Iterable[Any]) -> list[Any]:
    return [module for module in modules if next(module.parameters(), None) is not None]
