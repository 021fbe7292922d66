"""Records a few steps of the running job operation by operation, when it is asked to.

A window has three parts, and each begins and ends between two steps, on the training thread: one step in
which the operations are counted and the profiler is made ready; the steps that are recorded; and those in
which a thread of its own writes. None of these steps is in any figure of the run: the events say which they
are.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from diagnose.core.deep_window import KIND
from diagnose.hooks._cuda import index_of
from diagnose.launch import deep_window_profiler
from diagnose.launch.deep_window_under_way import Asked, Window, asked_of
from diagnose.launch.deep_window_writing import Writing
from diagnose.launch.place import place_of

if TYPE_CHECKING:
    from diagnose.hooks._recorder import Recorder
    from diagnose.tuner.question import Question

NEAR_STEPS = 200
"""The end of a step is looked at from so many steps before the one that was asked for: looking costs a few
microseconds a step."""

MAX_RECORDED = 1_000_000
"""Operations that a window may record: a GB of memory, until it is written."""

BYTES_PER_OPERATION = 700
"""Of the written trace, per operation that is counted: with those it is called through it is two or three
events."""

ROOM_BYTES = 500_000_000
"""What the disk must have beyond that."""

MAX_TRIES = 3
"""A loop that starts worker processes breaks a window off; so often another is begun instead."""

LOOK_AT_RULES_AFTER = 40
"""Steps after which the rules are asked whether a window would help them."""


class DeepWindows:
    """The windows of one process.

    Args:
        recorder: Tells where steps end; gets the events.
        folder: The run's folder.
        option: What `--deep-window` says; empty where it was not given.
    """

    def __init__(self, recorder: Recorder, folder: Path, option: str) -> None:
        self._recorder = recorder
        self._folder = folder
        self._asks_rules = option == "auto"
        self._question: Question | None = None
        self._asked = asked_of(option) if option and option != "auto" else None
        self._window: Window | None = None
        self._leaving: tuple[Window, str] | None = None  # undone, and why; its mode is still on
        self._writing = Writing(recorder, folder)
        self._tries = 0
        self._steps_before = 0
        self._boundary_ns = 0
        self._at_boundary = False
        self._theirs = False
        self._ours = False
        if self._asked is not None and self._asked.first_step <= NEAR_STEPS:
            self._watch()

    def _rank(self) -> int:
        return place_of(self._recorder.facts)[0]

    # -- in the flusher's thread

    def look(self) -> None:
        """Watches the end of steps while a window is near, and ends one that takes too long."""
        steps = self._recorder.steps
        if self._asked is not None and self._asked.by == "command":
            self._recorder.boundary_due = 0  # while it rests, tuning does not look in its place
        if self._asks_rules and self._asked is None and steps >= LOOK_AT_RULES_AFTER and not self._rank():
            self._ask_rules(steps)
        near = steps + NEAR_STEPS + 4 * (steps - self._steps_before)
        self._steps_before = steps
        if self._asked is not None and self._asked.first_step <= near:
            self._watch()
        window = self._window
        if window is not None and window.is_overdue():
            self._end_from_outside(window)

    def _ask_rules(self, steps: int) -> None:
        """Has a window taken if rules want one, as soon as they have said so."""
        question = self._question
        if question is None:
            from diagnose.tuner.question import Question

            question = Question("diagnose.launch.deep_window_rules", str(self._folder.absolute()))
            self._question = question
        names = question.answer()
        if names is not None:
            self._asks_rules, self._question = False, None
            if names:
                self._asked = Asked(first_step=steps, by=", ".join(names))
            else:
                self._event("refused", reason="no rule asked for one")

    def ask(self) -> str:
        """Takes the command for a window; returns why there will be none."""
        if any((self._asked, self._window, self._leaving, self._writing.is_on)):
            return "a deep window is being taken already"
        refusal = self._refusal()
        if refusal:
            return refusal
        self._tries = self._boundary_ns = 0
        self._asked = Asked(first_step=self._recorder.steps, by="command")
        if self._recorder.on_boundary is not None:
            waits = "it is taken as soon as no fix is being tried"
            self._recorder.event("command", command=KIND, argument="", state="waiting", reason=waits)
        self._watch()
        return ""

    def _watch(self) -> None:
        if self._recorder.on_boundary is None:  # tuning looks there too, and comes first
            self._recorder.on_boundary = self._boundary

    def _watch_no_more(self) -> None:
        if self._recorder.on_boundary == self._boundary:
            self._recorder.on_boundary = None
            self._recorder.rest_until(0)  # nobody is asked any more: the hooks may look away again

    def _end_from_outside(self, window: Window) -> None:
        """Asks the main thread to end a window between two of its instructions: no step may end any more.

        The profiler can be stopped by the thread that started it alone.
        """

        def end(_: Any) -> int:
            with contextlib.suppress(BaseException):
                if self._at_boundary:
                    window.is_told = False  # a step has just ended: it will be seen whether the next does
                elif self._window is window and threading.get_ident() == self._recorder.thread:
                    self._end("no step ended for long")
            return 0

        window.is_told = True
        window.pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(end)
        ctypes.pythonapi.Py_AddPendingCall(window.pending, None)

    # -- on the training thread

    def turn(self, calm: bool) -> bool:
        """Between two steps of a job that is tuned: takes the window that a command asked for.

        Args:
            calm: Whether no fix is being tried: what is measured then may be left out for some steps.

        Returns:
            Whether a window is under way.
        """
        asked = self._asked
        if self._is_on() or (calm and asked is not None and asked.by == "command"):
            self._boundary()
        else:
            self._boundary_ns = 0  # the next step that is looked at says nothing of a usual one
        if self._is_on():
            self._watch()  # tuning may have ended, which looked in its place
        return self._is_on()

    def _is_on(self) -> bool:
        """Whether something of a window slows the steps down."""
        return self._window is not None or self._leaving is not None

    def _boundary(self) -> None:
        """Between two steps."""
        recorder = self._recorder
        step = recorder.steps + (recorder.finder.provisional is not None)
        asked, window = self._asked, self._window
        before_ns, self._boundary_ns = self._boundary_ns, perf_counter_ns()
        self._at_boundary = True
        try:
            if not self._has_left():
                return
            if window is not None:
                window.seen(step, self._boundary_ns)
                if not window.recording:
                    self._record(window, step)
                elif step >= window.first_step + window.num_steps:
                    self._end("")
            elif asked is None or self._rank():  # a spawned rank knows its number only by now
                self._asked = None
                self._watch_no_more()
            elif step >= asked.first_step - 2:
                refusal = self._refusal()
                if refusal and asked.by == "option":
                    return  # it may end: then it is not too late
                if refusal:
                    self._refuse(refusal)
                elif step >= asked.first_step - 1 and before_ns:
                    self._begin(asked, step, self._boundary_ns - before_ns)
        except BaseException as error:
            self._undo(f"it failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._at_boundary = False

    def _refusal(self) -> str:
        if self._theirs:
            return "the script's own profiler is on"
        if threading.main_thread().ident != self._recorder.thread:
            return "the training loop is not in the main thread"
        return deep_window_profiler.why_not()

    def _refuse(self, reason: str) -> None:
        if self._asked is not None:
            self._asked.answer(self._recorder, reason)
        self._asked = None
        self._watch_no_more()
        self._event("refused", reason=reason)

    def _begin(self, asked: Asked, step: int, usual_ns: int) -> None:
        from diagnose.launch import deep_window_count

        begun = perf_counter_ns()
        window = Window(
            asked=asked,
            step=step,
            asides=self._recorder.asides,
            usual_ns=usual_ns,
            device=index_of(self._recorder.met.live_modules()),
        )
        self._window = window
        self._event("begun", first=step, by=asked.by)
        with self._alone():
            window.profiler.prepare()
        if self._window is not window:
            return  # ended meanwhile
        window.why_not_counted = deep_window_count.why_not()
        if not window.why_not_counted:
            window.count(self._recorder)
        window.begun_ns = perf_counter_ns()
        window.start_ns += window.begun_ns - begun

    def _record(self, window: Window, step: int) -> None:
        begun = perf_counter_ns()
        if not window.stop_counting(self._recorder.asides):
            return  # a mode of the script's is on top of ours: at the end of the next step
        operations = window.num_operations
        room = shutil.disk_usage(self._folder).free
        if operations > MAX_RECORDED:
            self._undo(f"a step has {operations:,} operations, too many to record")
            return
        window.num_steps = max(1, min(window.num_steps, MAX_RECORDED // max(1, operations)))
        if room < ROOM_BYTES + BYTES_PER_OPERATION * operations * window.num_steps:
            self._undo("the disk has no room for a trace")
            return
        window.profiler.wait()  # for what earlier steps have launched
        with self._alone():
            window.profiler.start()
        window.first_step = step
        window.began_ns = perf_counter_ns()
        window.start_ns += window.began_ns - begun
        window.recording = True

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _end(self, early: str) -> None:
        """Ends the window; what it holds of whole steps is kept."""
        window = self._window
        if window is None:
            return
        if not window.recording or window.seen_step <= window.first_step:
            self._undo(early or "no step ended")
            return
        begun = perf_counter_ns()
        if not early:  # a step has just ended on the host; else the device may wait for what comes no more
            window.profiler.wait()
            window.seen(window.seen_step, perf_counter_ns())
        window.profiler.stop()
        window.stop_ns = perf_counter_ns() - begun
        self._window, self._asked = None, None
        self._watch_no_more()
        self._writing.begin(window)

    def _undo(self, reason: str) -> None:
        """Ends the window and keeps nothing of it."""
        window, self._window = self._window, None
        self._asked = None
        self._watch_no_more()
        if window is not None:
            self._leaving = window, reason
            if not self._has_left():
                self._watch()
            with contextlib.suppress(Exception), self._alone():
                window.profiler.abandon()

    def _has_left(self, *, at_last: bool = False) -> bool:
        """Takes what an undone window counted with off the thread, and tells of its end; says whether
        nothing is left. It stays under a mode of the script's, and while an operation runs inside it.

        Args:
            at_last: Whether to tell of its end in any case: the script has ended.
        """
        if self._leaving is None:
            return True
        window, reason = self._leaving
        off = True
        with contextlib.suppress(Exception):
            off = window.stop_counting(-1)
        if off or at_last:
            self._leaving = None
            self._event("undone", last=self._recorder.steps + 1, reason=reason)
            window.asked.answer(self._recorder, reason)
        return off

    def script_begins(self) -> None:
        """The script makes its own profiler ready, or starts it: ours is gone before."""
        if self._window is not None and not self._ours:
            self._undo("the script's own profiler began")

    def script_prepared(self, prepared: bool) -> None:
        """The script's own profiler is ready, or done."""
        self._theirs = prepared

    def before_fork(self) -> None:
        """A child must not inherit a profiler that is on: it would record for ever."""
        window, asked = self._window, self._asked
        if window is None or asked is None or threading.get_ident() != self._recorder.thread:
            return
        self._undo("the script started a process")
        self._tries += 1
        if self._tries < MAX_TRIES:
            self._asked = asked
            self._watch()

    def forget(self) -> None:
        """In a forked child: what its parent takes is not its own."""
        self._asks_rules = False
        self._asked = self._window = self._leaving = self._question = None
        self._writing.forget()

    def finish(self) -> None:
        """The script has ended: keeps a window that holds whole steps, and waits until it is written."""
        if self._window is not None:
            self._recorder.guarded(self._end, "the script ended")
        elif self._asked is not None and self._asked.by in ("option", "command"):
            reason = self._refusal() or "the training ended before"
            self._asked.answer(self._recorder, reason)
            self._event("refused", reason=reason)
        elif self._asks_rules and not self._rank():
            self._event("refused", reason="the training ended before the rules had answered")
        self._has_left(at_last=True)
        self._asks_rules = False
        question, self._question = self._question, None
        if question is not None:
            question.close()
        self._writing.wait()

    def _event(self, state: str, **detail: Any) -> None:
        self._recorder.event(KIND, state=state, **detail)
