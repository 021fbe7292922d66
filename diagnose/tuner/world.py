"""What the tuner needs of its process, what a step of the script is to it, and where tuning stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, Protocol, TypeVar

from diagnose.actions.base import Action, CannotApply
from diagnose.core.command import Command
from diagnose.core.job import Job
from diagnose.tuner.agreement import Alone, Ranks
from diagnose.tuner.diagnosis import Diagnosis
from diagnose.tuner.installed import Installed
from diagnose.tuner.loss_trend import LossTrend
from diagnose.tuner.pauses import Pauses

BUDGET_SHARE = 0.05
BUDGET_FLOOR_NS = 5_000_000_000
"""Tuning may cost this part of the run, from when it began to its end, beyond what the same steps would
have taken without it. Where nobody knows when that is, it is this part of the time so far, and in any
case so many nanoseconds: a short run could else try nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One finished step of the script.

    Attributes:
        number: How many have finished.
        time_ns: Its wall time, without what the tuner did after it.
        aside: Whether it also evaluated, saved or compiled: no part of a comparison.
        begins: Whether it began an epoch.
        num_samples: Samples that loaders handed over for it; 0 where none tells.
        passed: How many have finished since the one that the plan was told of before.
        paused_ns: What full garbage collections took of it.
    """

    number: int
    time_ns: int
    aside: bool
    begins: bool = False
    num_samples: int = 0
    passed: int = 1
    paused_ns: int = 0


T = TypeVar("T")
Plan = Generator[int, Step, T]
"""Yields how many steps it need not be asked for. Resumed at the end of the last of them, or of an earlier
one, with that step."""


class Numerics(Protocol):
    """The answer of a numerics check."""

    @property
    def ok(self) -> bool:
        """Whether the action may be tried."""

    @property
    def reason(self) -> str:
        """Why, in words."""


class Snapshot(Protocol):
    """What training had come to at one moment."""

    def check(self) -> None:
        """Looks whether it can be put back. Changes nothing.

        Raises:
            CannotApply: If not.
        """

    def restore(self, job: Job) -> None:
        """Puts it back, to the bit."""


def no_snapshot(job: Job) -> Snapshot:
    """For a process whose training cannot be put back."""
    raise CannotApply("weights cannot be kept here")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The process; tests have one of their own.

    Attributes:
        job: The live objects.
        actions: All actions by name.
        diagnose: Begins to ask the rules about the steps from this one on. Called on rank 0 only.
        watch: While open, what a numerics check needs of a step is remembered.
        check_numerics: Compares what the job computes with an action and without.
        time_passes: Times passes of the models beside the training: nanoseconds without an action and with
            it; `None` where there can be none.
        tell: Writes down what happened: kind and details, JSON's types only.
        stop: Called when nothing is left to be done at step ends.
        look: Fills the job with what the loop uses now, where that was not done as tuning rested.
        clock: Nanoseconds.
        synchronize: Waits until the device has done what it was given; nothing on a CPU.
        uncounted: While open, the memory of a device that is needed counts as no need of the script's.
        ranks: The processes that train together, this one among them.
        commands: What a person has asked this process for since. Another thread adds to it.
        losses: Returns the training loss of steps that is known by now and was not told before. From the
            first call on losses are taken note of.
        loss: What they come to.
        snapshot: Keeps what training has come to; raises `CannotApply` where that does not go.
        pauses: What full garbage collections take.
    """

    job: Job
    actions: Mapping[str, Action]
    diagnose: Callable[[int], Diagnosis]
    watch: Callable[[], AbstractContextManager[None]]
    check_numerics: Callable[[Job, Installed], Numerics]
    tell: Callable[[str, dict[str, Any]], None]
    stop: Callable[[], None]
    time_passes: Callable[[Job, Installed], tuple[int, int] | None] = lambda job, installed: None
    look: Callable[[], None] = lambda: None
    clock: Callable[[], int] = perf_counter_ns
    synchronize: Callable[[], None] = lambda: None
    uncounted: Callable[[], AbstractContextManager[None]] = nullcontext
    ranks: Ranks = field(default_factory=Alone)
    commands: deque[Command] = field(default_factory=deque)
    losses: Callable[[], Sequence[float]] = tuple
    loss: LossTrend = field(default_factory=LossTrend)
    snapshot: Callable[[Job], Snapshot] = no_snapshot
    pauses: Pauses = field(default_factory=lambda: Pauses(counts=False))


@dataclass(slots=True)
class Spending:
    """What tuning has cost the script so far.

    Attributes:
        begun_ns: When it began.
        spent_ns: Nanoseconds beyond what the same steps would have taken without it.
    """

    begun_ns: int
    spent_ns: float = 0.0

    @contextmanager
    def charged(self, clock: Callable[[], int]) -> Iterator[None]:
        """All that is done inside counts as spent; no step passes there."""
        begun = clock()
        try:
            yield
        finally:
            self.spent_ns += clock() - begun

    def affordable(self, now_ns: int, left_ns: float | None = None, cost_ns: float = 0.0) -> bool:
        """Whether another trial may be begun.

        Args:
            left_ns: What is left of the run; `None` where nobody knows.
            cost_ns: What is known to be spent at once, besides.
        """
        spent_ns = self.spent_ns + cost_ns
        if left_ns is not None:
            return spent_ns <= BUDGET_SHARE * (now_ns - self.begun_ns + left_ns)
        return spent_ns <= max(BUDGET_FLOOR_NS, BUDGET_SHARE * (now_ns - self.begun_ns))


class Course:
    """Where tuning stands.

    Attributes:
        state: See `Controller.state`.
        step: The latest step of the script.
        looks: How many of its steps were looked at: in the others tuning rested.
        spending: What tuning has cost.
    """

    def __init__(self, world: World) -> None:
        self.state = ""
        self.step = Step(number=0, time_ns=0, aside=False)
        self.looks = 0
        self.spending = Spending(world.clock())
        self._world = world

    def enter(self, state: str) -> None:
        """Notes what is being done from now on, and writes it down."""
        if state != self.state:
            self.state = state
            self._world.tell("tuning", {"state": state, "step": self.step.number})
