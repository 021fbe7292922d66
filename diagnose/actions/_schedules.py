"""Keeps learning rate schedules that go by steps in time with the script's batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch.optim import Optimizer, lr_scheduler

from diagnose.core.job import Job
from diagnose.hooks.base import hidden, replaced

SURE = 3
"""Steps in a row whose rate was changed by nothing of torch's: the script itself does so in each step."""


@dataclass(slots=True)
class _Calls:
    """How often the script stepped one schedule: in this step, and in the one before."""

    now: int = 0
    before: int = 0
    owed: int = 0


class Schedules:
    """The schedules of some optimizers, which the script steps once for a batch that is several.

    One that was stepped in two training steps in a row goes by steps, and is stepped for the other parts of
    the batch, too. Any other goes by epochs, and is left alone.

    Attributes:
        refused: Why the schedule cannot keep up; empty while it can.
    """

    def __init__(self, optimizers: list[Optimizer]) -> None:
        self.refused = ""
        self._optimizers = list(map(ref, optimizers))
        self._calls: WeakKeyDictionary[Any, _Calls] = WeakKeyDictionary()
        self._inside = False
        self._rates: list[Any] = []
        self._changes = 0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Notices what the script steps while open."""
        own = [
            value
            for value in vars(lr_scheduler).values()
            if isinstance(value, type)
            and issubclass(value, lr_scheduler.LRScheduler)
            and "step" in vars(value)
        ]
        with ExitStack() as stack:
            for kind in own:
                stack.enter_context(replaced(kind, "step", self._noting))
            yield

    def step_ended(self, parts: float, job: Job) -> None:
        """A step has ended that trained on so many batches of the script's."""
        stepped = False
        for schedule, calls in list(self._calls.items()):
            stepped = stepped or calls.now > 0
            calls.owed = (calls.owed + round(calls.now * (parts - 1))) if calls.now else 0
            if calls.now and calls.before:
                self._catch_up(schedule, calls.owed, job)
                calls.owed = 0
            calls.before, calls.now = calls.now, 0
        self._look(stepped)

    def _catch_up(self, schedule: Any, times: int, job: Job) -> None:
        self._inside = True
        try:
            with job.unmeasured():
                for _ in range(times):
                    schedule.step()
        except ValueError as error:  # the end of a schedule of known length
            self.refused = f"the learning rate's schedule cannot go on: {error}"
        finally:
            self._inside = False

    def _look(self, stepped: bool) -> None:
        alive = [optimizer for each in self._optimizers if (optimizer := each()) is not None]
        rates = [group["lr"] for optimizer in alive for group in optimizer.param_groups]
        changed = len(rates) == len(self._rates) and any(
            rate is not before and bool(rate != before)
            for rate, before in zip(rates, self._rates, strict=True)
        )
        self._changes = self._changes + 1 if changed and not stepped else 0
        self._rates = rates
        if self._changes >= SURE:
            self.refused = "the script sets the learning rate in each step: it would lag behind the batches"

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            mine = getattr(schedule, "optimizer", None)
            known = mine is not None and any(each() is mine for each in self._optimizers)
            if self._inside or args or kwargs or not known:
                return original(schedule, *args, **kwargs)
            self._inside = True  # what it steps itself is a part of it
            try:
                result = original(schedule)
            finally:
                self._inside = False
            self._calls.setdefault(schedule, _Calls()).now += 1
            return result

        return hidden(functools.wraps(original)(step))
