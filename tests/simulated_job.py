"""A simulated job for the tuner: its clock is ours, its actions change only how long a step takes."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from diagnose.actions.base import Action, CannotApply, NotYet
from diagnose.core.finding import Gain
from diagnose.core.job import Job
from diagnose.core.trial import Safety
from diagnose.tuner.agreement import Alone, Ranks
from diagnose.tuner.controller import Controller
from diagnose.tuner.installed import Installed
from diagnose.tuner.kept import Kept
from diagnose.tuner.policy import Lead, Policy
from diagnose.tuner.world import World

MS = 1_000_000


@dataclass
class Machine:
    """A job whose steps take `base_ns` times the factor of each action in force, times noise."""

    seed: int = 0
    base_ns: float = 20 * MS
    spread: float = 0.1
    memory: float = 0.15
    now: int = 0
    steps: int = 0
    factors: dict[str, float] = field(default_factory=dict)
    told: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    stopped: int = 0
    boundaries: int = 0
    look_ns: int = 0
    """What a step takes longer that is looked at."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._level = 0.0

    def step_ns(self) -> int:
        """Noise as measured on shared machines: much of it lasts a hundred steps, and one in a hundred
        takes three times as long."""
        draw = self._random.gauss
        self._level = 0.99 * self._level + draw(0, self.memory * math.sqrt(1 - 0.99**2))
        spike = 3.0 if self._random.random() < 0.01 else 1.0
        noise = math.exp(self._level + draw(0, self.spread))
        return int(self.base_ns * math.prod(self.factors.values()) * noise * spike)

    def trials(self) -> list[dict[str, Any]]:
        return [detail for kind, detail in self.told if kind == "trial"]

    def outcomes(self) -> dict[str, str]:
        return {trial["action"]: trial["outcome"] for trial in self.trials()}

    def last(self, kind: str) -> dict[str, Any]:
        return [detail for told, detail in self.told if told == kind][-1]


@dataclass
class Change(Action):
    """An action that makes steps take `factor` times as long."""

    machine: Machine
    name: str
    factor: float = 1.0
    safety: Safety = Safety.EXACT  # type: ignore[misc]  # a variable of the class elsewhere
    order: int = 30  # type: ignore[misc]
    excludes: frozenset[str] = frozenset()  # type: ignore[misc]
    settle_steps: int = 1  # type: ignore[misc]
    window_steps: int = 5  # type: ignore[misc]
    touches: str = "nothing"  # type: ignore[misc]
    steady: bool = False  # type: ignore[misc]
    unasked: bool = False  # type: ignore[misc]
    at_start: bool = False  # type: ignore[misc]
    frees_memory: bool = False  # type: ignore[misc]
    refuses: str = ""
    not_before: int = 0
    gives_up: str = ""
    fails_on: str = ""
    error: type[Exception] = OSError
    leaves_trace: bool = False
    choices: Sequence[int | None] = (None,)
    factor_of: dict[int | None, float] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def check(self, job: Job) -> None:
        self._call("check")
        if self.refuses:
            raise CannotApply(self.refuses)
        if self.machine.steps < self.not_before:
            raise NotYet("it is too early")

    def values(self, job: Job) -> Sequence[int | None]:
        return self.choices

    @contextmanager
    def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
        self._call("prepare")
        yield value
        self._call("unprepare")

    @contextmanager
    def apply(self, job: Job, prepared: Any) -> Iterator[None]:
        self._call("apply")
        if self.gives_up:
            raise CannotApply(self.gives_up)
        assert self.name not in self.machine.factors, "it is in force already"
        self.machine.factors[self.name] = self.factor_of.get(prepared, self.factor)
        yield
        if not self.leaves_trace:
            del self.machine.factors[self.name]
        self._call("undo")

    def state(self, job: Job) -> Any:
        return self.machine.factors.get(self.name)

    def _call(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fails_on:
            raise self.error(f"{what} failed")


@dataclass
class Exclusive(Change):
    """An action that must not be in force together with those that it excludes."""

    def apply(self, job: Job, prepared: Any) -> AbstractContextManager[None]:
        assert not self.excludes & set(self.machine.factors), "both are in force"
        return super().apply(job, prepared)


@dataclass
class Settled(Change):
    """An action that knows its setting only while it is not in force."""

    def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
        if self.name in self.machine.factors:
            raise CannotApply("it is so already")
        return {"Loader.size": str(value)}


class Found:
    """A diagnosis that takes so many steps."""

    def __init__(self, leads: list[Lead], steps: int = 2, cost_ns: float = 0.0) -> None:
        self._leads, self._steps, self.cost_ns = leads, steps, cost_ns

    def leads(self) -> list[Lead] | None:
        self._steps -= 1
        return None if self._steps >= 0 else self._leads

    def close(self) -> None:
        self._steps = 0


@dataclass(frozen=True)
class Numbers:
    ok: bool
    reason: str = "compared"


def lead(*actions: str, speedup: float = 1.5, rule: str = "some-fault") -> Lead:
    return Lead(rule=rule, actions=actions, gain=Gain(speedup=speedup, low=1.0, high=2 * speedup))


def controller(
    machine: Machine,
    actions: Sequence[Change],
    leads: Sequence[Lead] | None = None,
    *,
    policy: Policy | None = None,
    again: Sequence[Lead] | None = None,
    reuse: Sequence[Kept] | None = None,
    numbers: Numbers = Numbers(ok=True),
    ranks: Ranks | None = None,
    **more: Any,
) -> Controller:
    """Returns a controller of that job; the rules find `leads`, and `again` from their second answer on."""
    found = leads if leads is not None else [lead(action.name) for action in actions]
    answers = itertools.chain([found], itertools.repeat(found if again is None else again))

    def check(job: Job, installed: Installed) -> Numbers:
        context: AbstractContextManager[None] = installed.context()
        with context:
            pass
        return numbers

    def stop() -> None:
        machine.stopped += 1

    world = World(
        job=Job(),
        actions={action.name: action for action in actions},
        diagnose=lambda first_step: Found(list(next(answers))),
        watch=nullcontext,
        check_numerics=check,
        tell=lambda kind, detail: machine.told.append((kind, detail)),
        stop=stop,
        clock=lambda: machine.now,
        ranks=ranks or Alone(),
        **more,
    )
    return Controller(world, policy or Policy(), reuse)


def train(machine: Machine, control: Controller, steps: int) -> None:
    for _ in range(steps):
        machine.now += machine.step_ns()
        if control.rests_until <= machine.steps + 1:
            machine.now += machine.look_ns
        machine.steps += 1
        if not control.rests(machine.steps):
            machine.boundaries += 1
            control.boundary(machine.steps, aside=False)


def train_until(machine: Machine, control: Controller, state: str) -> None:
    while control.state != state:
        train(machine, control, 1)
