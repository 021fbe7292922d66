"""A small script that is really tuned, in this process, while something of ours or of its own fails."""

from __future__ import annotations

import builtins
import itertools
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter_ns
from types import FrameType
from typing import Any

import pytest

import diagnose
from diagnose import actions
from diagnose.actions import (
    _autocast,
    _blame,
    _loader_serving,
    activation_checkpointing,
    keep_freed_memory,
    optimizer_in_backward,
)
from diagnose.actions._compiled import Compiler
from diagnose.actions.base import Action
from diagnose.core import plugins
from diagnose.core.job import Job
from diagnose.core.trial import Measured
from diagnose.launch import tuning
from diagnose.tuner import asking, controller, diagnosis, holding, windows
from diagnose.tuner.paired import PairedTest, Verdict
from diagnose.tuner.trying import Attempt
from tests.fakes import measured
from tests.short_script import Ending, Script, run

ACTIONS = plugins.discover(actions, Action)
OURS, HOOKED = str(Path(diagnose.__file__).parent), str(Path(actions.__file__).parent)

NEVER_FAIL = (list, dict, deque, set, tuple, str)
"""Nor do functions that are built into Python."""

WAYS_BACK = ("__enter__", "__exit__", "restore", "revert")
READS = ("data_ptr", "detach", "dim", "element_size", "is_contiguous", "is_floating_point", "numel")
GUARDS = ("_fill", "_finished", "_ours", "pop")
"""Nor does what only looks at a tensor; and where a way back fails itself, what catches a failure, or what
counts the batch that torch has just handed out, none can go on as before."""


class Injected(KeyError):
    """Raised by a test in our code; no part of it raises or expects such a thing."""


@dataclass
class Fault:
    """Something that goes wrong once.

    Attributes:
        where: The callback: of an action, of the process, or `hook` for what an action has hung into the
            script.
        nth: How often it goes well before. Of `hook` it is calls that our code makes while the script runs.
        error: What is raised.
        seen: How often it was about to.
        at: Which call of a hook it was.
    """

    where: str = ""
    nth: int = 0
    error: type[Exception] = Injected
    seen: int = field(default=0, init=False)
    at: str = field(default="", init=False)

    @property
    def happened(self) -> bool:
        return self.seen > self.nth

    def may_happen(self, where: str, at: str = "") -> None:
        """Something of this name is under way."""
        if where == self.where and not self.happened:
            self.seen += 1
            if self.happened:
                self.at = at
                raise self.error("injected")


def faulty(action: Action, fault: Fault) -> Action:
    """The action, with all that the tuner calls of it failing when the fault says so."""
    kind: Any = type(action)

    class Faulty(kind):  # type: ignore[misc]
        settle_steps = min(kind.settle_steps, 2)
        window_steps = 1

        def check(self, job: Job) -> None:
            fault.may_happen("check")
            super().check(job)

        def values(self, job: Job) -> Sequence[int | None]:
            fault.may_happen("values")
            return list(super().values(job))[:2]

        def start_up_s(self, job: Job) -> float:
            fault.may_happen("start_up_s")
            return 0.0

        @contextmanager
        def prepare(self, job: Job, value: int | None) -> Iterator[Any]:
            fault.may_happen("prepare")
            with super().prepare(job, value) as ready:
                fault.may_happen("prepared")
                yield ready
            fault.may_happen("unprepared")

        @contextmanager
        def apply(self, job: Job, prepared: Any) -> Iterator[None]:
            fault.may_happen("apply")
            with super().apply(job, prepared):
                fault.may_happen("applied")
                yield
            fault.may_happen("undone")

        def why_not_stay(self, prepared: Any) -> str:
            fault.may_happen("why_not_stay")
            return str(super().why_not_stay(prepared))

        def state(self, job: Job) -> Any:
            fault.may_happen("state")
            return super().state(job)

        def verify_undone(self, job: Job, before: Any) -> None:
            fault.may_happen("verify_undone")
            super().verify_undone(job, before)

        def settings(self, job: Job, value: int | None) -> Mapping[str, str]:
            fault.may_happen("settings")
            return dict(super().settings(job, value))

    Faulty.__name__ = kind.__name__
    return Faulty()


OF_AN_ACTION = (
    "check",
    "values",
    "start_up_s",
    "prepare",
    "prepared",
    "unprepared",
    "apply",
    "applied",
    "undone",
    "why_not_stay",
    "state",
    "verify_undone",
    "settings",
)
OF_THE_PROCESS = ("diagnose", "leads", "watch", "numerics", "told", "losses", "snapshot", "boundary")


class InTheScript:
    """Watches the calls that hooks of actions make while the script runs; one of them fails.

    Args:
        fault: Says which; of the calls of Python functions those of ours only, for what the script's own
            raise is its own.
    """

    def __init__(self, fault: Fault) -> None:
        self.on = False
        self._fault = fault
        self._process = os.getpid()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event not in ("call", "c_call"):
            return
        if event == "c_call":
            caller, name = frame, argument.__name__
            holder = argument.__self__
            if holder is builtins or isinstance(holder, NEVER_FAIL):
                return
        else:
            caller, name = frame.f_back, frame.f_code.co_name
            if not frame.f_code.co_filename.startswith(OURS):
                return
        if caller is None or not caller.f_code.co_filename.startswith(HOOKED):
            return
        if name in (*WAYS_BACK, *READS, *GUARDS):
            return
        if os.getpid() == self._process:  # no worker of a loader
            place = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno} calls {name}"
            self._fault.may_happen("hook", place)


class Found:
    """A diagnosis that finds nothing: all actions are asked for by name."""

    def __init__(self, fault: Fault) -> None:
        fault.may_happen("diagnose")
        self._fault = fault

    cost_ns = 0.0

    def leads(self) -> list[Any]:
        self._fault.may_happen("leads")
        return []

    def close(self) -> None:
        """Nothing is under way."""


def run_tuned(
    script: Script,
    names: Sequence[str],
    fault: Fault,
    verdicts: Sequence[Verdict],
    stays: bool,
    folder: Path,
) -> Ending:
    """Runs the script with the hooks, the process's part of the tuner and the controller as they are.

    Decisions do not wait for what is measured: windows are one step long, and what they come to is given.

    Args:
        script: Which.
        names: The actions that are asked for.
        fault: What fails.
        verdicts: What trials come to, in turn.
        stays: Whether what is kept is always confirmed.
        folder: The run's.
    """
    asked = {"allow": ["precision", "training"], "only": names, "skip": [], "dry_run": False, "apply": ""}
    watch = InTheScript(fault)
    with pytest.MonkeyPatch.context() as patch, measured(perf_counter_ns) as recorder:
        in_a_hurry(patch, itertools.cycle(verdicts))
        if stays:
            patch.setattr(PairedTest, "measured", confirmed(PairedTest.measured))
        failing_process(patch, fault)
        # What fails by order of this file is ours; the script is in another one.
        patch.setattr(_blame, "PACKAGE", (_blame.PACKAGE, __file__))
        patch.setattr(
            plugins, "discover", lambda *_: {name: faulty(ACTIONS[name], fault) for name in names}
        )
        of_hooks = list(recorder.looks.on_iterator)
        begun: list[tuning.LiveTuning] = []
        recorder.guarded(lambda: begun.append(tuning.LiveTuning(recorder, folder, asked)))

        def boundary() -> None:
            watch.on = False
            try:
                begun[0]._boundary()
            finally:
                watch.on = True

        def ends() -> None:
            watch.on = False
            sys.setprofile(None)
            for live in begun:
                recorder.guarded(live.finish)

        if begun:
            recorder.on_boundary = boundary
        sys.setprofile(watch)
        try:
            watch.on = True
            ending = run(script, ends)
        finally:
            ends()
        ending.notes = list(recorder.notes)
        ending.told = [(kind, detail) for *_, kind, detail in recorder.events]
        on_step = [call for live in begun for call in live._job.on_step]
        on_iterator = [call for call in recorder.looks.on_iterator if call not in of_hooks]
        ending.left_in_the_job = [recorder.routes, on_step, on_iterator]
    return ending


def in_a_hurry(patch: pytest.MonkeyPatch, verdicts: Iterator[Verdict]) -> None:
    """Lets the tuner do in some ten steps what takes hundreds."""
    for module, name, value in (
        (controller, "WARMUP_STEPS", 2),
        (asking, "OBSERVED_STEPS", 1),
        (asking, "OBSERVED_NS", 0),
        (holding, "CONFIRM_PAIRS", 2),
        (holding, "DOUBT_PAIRS", 1),
        (holding, "LOSS_PAIRS", 4),
        (holding, "LOSS_CONFIDENCE", 0.999999),  # with windows of one step anything looks like a loss
        (holding, "LOOK_STEPS", 3),
        (holding, "RECHECK_STEPS", 6),
        (windows, "WINDOW_STEPS", 1),
        (windows, "WINDOW_NS", 0),
        (windows, "MAX_WINDOW_STEPS", 1),
        (_autocast, "MIN_RATE", 0.0),
        (_autocast, "PROBE_SIZES", (32,)),
        (_loader_serving, "BURSTS", 0),
        (keep_freed_memory, "_is_short", lambda: False),
        (activation_checkpointing, "refuse_unless_short", lambda job: None),
        (optimizer_in_backward, "refuse_unless_short", lambda job: None),
        (Compiler, "_backend", lambda self, graph, inputs: graph),
        (Attempt, "_is_doubtful", lambda attempt, test: False),  # the verdicts are made up
        (PairedTest, "verdict", lambda test: next(verdicts) if len(test.logs) >= 2 else None),
    ):
        patch.setattr(module, name, value)


def confirmed(measured: Callable[..., Measured | None]) -> Callable[..., Measured | None]:
    """What measures that every change helps."""

    def call(test: PairedTest, *confidence: float) -> Measured | None:
        found = measured(test, *confidence)
        return found and replace(found, speedup=1.5, low=1.2, high=1.8)

    return call


def failing_process(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Lets what the controller is given by the process fail."""
    patch.setattr(diagnosis, "OtherProcess", lambda folder, first_step: Found(fault))
    for owner, name, where in (
        (tuning.LiveTuning, "_watch", "watch"),
        (tuning.LiveTuning, "_tell", "told"),
        (tuning.LiveTuning, "_latest_losses", "losses"),
        (tuning.LiveTuning, "_snapshot", "snapshot"),
        (tuning.LiveTuning, "_look", "boundary"),
        (tuning, "_check_numerics", "numerics"),
    ):
        patch.setattr(owner, name, failing(getattr(owner, name), fault, where))


def failing(function: Callable[..., Any], fault: Fault, where: str) -> Callable[..., Any]:
    """The function, which fails when the fault says so."""

    def call(*args: Any, **kwargs: Any) -> Any:
        fault.may_happen(where)
        return function(*args, **kwargs)

    return call
