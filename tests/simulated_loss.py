"""The loss of a simulated job, whose weights can be kept and put back."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from diagnose.actions.base import CannotApply
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.controller import Controller
from diagnose.tuner.policy import Policy
from tests.simulated_job import Change, Machine, controller

ALLOWED = Policy(allowed=frozenset({Safety.PRECISION, Safety.TRAINING}))


@dataclass
class Training:
    """Its loss falls and scatters, until `wrong` says what else it is."""

    machine: Machine
    wrong: Callable[[], float | None] = lambda: None
    weights: int = 0
    restored: list[int] = field(default_factory=list)
    room: bool = True
    stale: bool = False
    asked: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(0)

    def losses(self) -> tuple[float]:
        self.asked += 1
        self.weights = self.machine.steps
        wrong = self.wrong()
        return (1 + math.exp(self._random.gauss(0, 0.2)) if wrong is None else wrong,)

    def snapshot(self, job: Job) -> Training.Kept:
        if not self.room:
            raise CannotApply("there is no room")
        return self.Kept(self, self.weights)

    @dataclass
    class Kept:
        of: Training
        weights: int

        def check(self) -> None:
            if self.of.stale:
                raise CannotApply("a tensor has another shape")

        def restore(self, job: Job) -> None:
            assert self.of.machine.factors == {}, "what harmed is out before the weights are put back"
            self.of.weights = self.weights
            self.of.restored.append(self.weights)


def tuned(machine: Machine, training: Training, *actions: Change, **more: object) -> Controller:
    more = {"policy": ALLOWED, "losses": training.losses, "snapshot": training.snapshot, **more}
    return controller(machine, actions, **more)  # type: ignore[arg-type]
