"""Samples which line of the user's code the training thread is in, at a low rate.

A kernel timer sends the training thread a signal every few milliseconds; the handler runs between two of
its instructions. A sampling thread would have to wait for the interpreter lock, so it would see long calls
that release the lock and miss Python code that holds it; the signal sees both. When a call into C outlasts
several ticks, its one sample weighs as many.

`SIGURG` is ignored by default, so a signal that arrives late harms nobody, and hardly any program uses it;
the Go runtime picked it for preemption for the same reasons. System calls that it interrupts restart.
"""

from __future__ import annotations

import contextlib
import ctypes
import random
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic_ns, thread_time_ns
from types import FrameType
from typing import Any

from diagnose.hooks._frames import user_stack
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._writes import Writes

SIGNAL = getattr(signal, "SIGURG", None)

WAKES = "source lines are not sampled while signals wake an event loop (signal.set_wakeup_fd)"
"""Each signal of ours would write to its pipe, too, until one that the script waits for finds no room."""

INTERVAL_NS = (2_500_000, 4_500_000)
"""Bounds of the interval between samples. It is drawn anew every flush, lest it keep step with the loop."""

DENSE_SAMPLES = 600
"""So many samples are taken at that rate, in about two seconds. Then there are enough to be sparing."""

SPARSE = 3.0
"""The interval is then this many times longer, or more, as far as `COST_PER_STEP_NS` asks."""

COST_PER_STEP_NS = 20_000
"""What the sampler may take of a step, on average: its part of the promised 50 us."""

ENOUGH_SAMPLES = 2000
"""Until there are so many, only the handler's own time counts towards `COST_PER_STEP_NS`, and a long step
pays more than that; then the signals do, too."""

SIGNAL_NS = 70_000
"""What a signal of the timer costs besides our handler. It cannot be seen from inside; this was measured as
the difference between loops with and without a handler that does nothing, in a virtual machine, where an
interrupt is dear. Elsewhere it is less."""

MOST_STOOD = 10_000
"""Samples that wait to be asked whether the thread had a CPU; the flusher asks twice a second."""

MAX_STRETCH = 16
"""Still one sample in about 50 ms, however long the steps are."""

_CLOCK_MONOTONIC = 1
_SIGEV_THREAD_ID = 4
_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000


class _SigEvent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("thread", ctypes.c_int),
        ("padding", ctypes.c_char * 44),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("first", _TimeSpec))


class Sampler:
    """Adds sampled stacks of the main thread to `recorder.log.sampled` while it runs.

    Args:
        recorder: Says which slot is running.

    Attributes:
        cost_ns: CPU time that sampling has taken of the training thread so far, `SIGNAL_NS` included.
        count: Number of samples so far.
        set_eval_frame: Dynamo's switch, once it is imported; returns the callback that it replaces.
        missing: Why there are no samples, in words; empty when there are.
        stood: Stack, nanoseconds since the sample before, and those in which the thread used no CPU, where
            it stood at the same place then, in the same step; or in a call that outlasted several ticks,
            from the first of them on. The flusher takes them.
        writes: Which stacks write to gradients, or to copies of the weights. The flusher takes them.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.cost_ns = 0
        self.count = 0
        self.set_eval_frame: Callable[[Any], Any] | None = None
        self.missing = ""
        self._recorder = recorder
        self._timer: ctypes.c_void_p | None = None
        self._interval_ns = 0
        self._started_ns = 0
        self._charged_ns = 0
        self._taken_ns = 0
        self._cpu_ns = 0
        self._place: tuple[tuple[int, ...], int] = ((), 0)
        self.stood: deque[tuple[tuple[int, ...], int, int]] = deque(maxlen=MOST_STOOD)
        self.writes = Writes(recorder)
        self._previous_handler: Any = None
        self._libc: Any = None

    def start(self) -> None:
        """Starts sampling the calling thread. Where that cannot be done, says so in `missing`."""
        if SIGNAL is None or not sys.platform.startswith("linux"):
            self.missing = f"source lines are not sampled on {sys.platform}"
        elif threading.current_thread() is not threading.main_thread():
            self.missing = "source lines are not sampled: the training loop is not in the main thread"
        elif signal.getsignal(SIGNAL) not in (signal.SIG_DFL, signal.SIG_IGN, self._handle):
            self.missing = "source lines are not sampled: the script uses SIGURG itself"
        elif (fd := signal.set_wakeup_fd(-1)) >= 0:
            self._give_way(fd)
        else:
            self._arm()

    def _arm(self) -> None:
        assert SIGNAL is not None
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            create = libc.timer_create
        except AttributeError:  # glibc before 2.34
            libc = ctypes.CDLL("librt.so.1", use_errno=True)
            create = libc.timer_create
        self._libc = libc
        event = _SigEvent(signo=SIGNAL, notify=_SIGEV_THREAD_ID, thread=threading.get_native_id())
        timer = ctypes.c_void_p()
        if create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
            self.missing = f"source lines are not sampled: timer_create failed ({ctypes.get_errno()})"
            return
        self._previous_handler = signal.signal(SIGNAL, self._handle)
        signal.siginterrupt(SIGNAL, False)
        self._timer = timer
        self._recorder.looks.inspections.append(self.writes.begin)
        self._started_ns = self._charged_ns = self._taken_ns = monotonic_ns()
        self._cpu_ns = thread_time_ns()
        self.vary()

    def vary(self) -> None:
        """Draws a new interval. Any thread may call it."""
        timer = self._timer
        if timer is None:
            return
        interval = int(random.SystemRandom().randint(*INTERVAL_NS) * self._stretch())
        self._interval_ns = interval
        first = divmod((monotonic_ns() // interval + 1) * interval, _NS_PER_S)
        spec = _TimerSpec(_TimeSpec(0, interval), _TimeSpec(*first))
        self._libc.timer_settime(timer, _TIMER_ABSTIME, ctypes.byref(spec), None)

    def _stretch(self) -> float:
        """Returns how many times longer than `INTERVAL_NS` the interval has to be."""
        if self.count < DENSE_SAMPLES:
            return 1.0
        step_ns = (monotonic_ns() - self._started_ns) / max(1, self._recorder.steps)
        samples_per_step = step_ns / (sum(INTERVAL_NS) / 2)
        sample_ns = self.cost_ns / self.count - (SIGNAL_NS if self.count < ENOUGH_SAMPLES else 0)
        wanted = samples_per_step * sample_ns / COST_PER_STEP_NS
        return min(max(wanted, SPARSE), float(MAX_STRETCH))

    def take_stood(self) -> list[tuple[tuple[int, ...], int, int]]:
        """Returns what `stood` has, each stack once. For the flusher's thread."""
        sums: dict[tuple[int, ...], tuple[int, int]] = {}
        for _ in range(len(self.stood)):
            stack, ns, off_ns = self.stood.popleft()
            before = sums.get(stack, (0, 0))
            sums[stack] = (before[0] + ns, before[1] + off_ns)
        return [(stack, *both) for stack, both in sums.items()]

    def stop(self) -> None:
        """Stops sampling and puts the signal's handler back. Call it in the main thread."""
        if self._timer is None:
            return
        assert SIGNAL is not None
        self._libc.timer_delete(self._timer)
        self._timer = None
        if signal.getsignal(SIGNAL) == self._handle:
            signal.signal(SIGNAL, self._previous_handler)

    def disarm(self) -> None:
        """In a forked child, where the timer does not exist: gives the signal back, perhaps to a worker's
        sampler."""
        if self._timer is not None:
            self._timer = None
            if SIGNAL is not None and signal.getsignal(SIGNAL) == self._handle:
                signal.signal(SIGNAL, self._previous_handler)

    def _give_way(self, fd: int) -> None:
        """Ends the sampling, and puts back the pipe that signals write to."""
        with contextlib.suppress(OSError, ValueError):  # it is closed
            signal.set_wakeup_fd(fd, warn_on_full_buffer=False)
        self.stop()
        self.missing = WAKES

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        begun = thread_time_ns()  # where others have the CPU meanwhile, that is none of our doing
        if (fd := signal.set_wakeup_fd(-1)) >= 0:  # nothing else tells
            self._give_way(fd)
            return
        now = monotonic_ns()
        # Since the last sample, whatever the interval was in between: when a long call into C returns, the
        # flusher may have drawn a new one just before this.
        tick_ns = now - now % self._interval_ns
        weight = tick_ns - self._charged_ns
        if weight <= 0:
            return
        self._charged_ns = tick_ns
        recorder = self._recorder
        if not recorder.thread:
            return
        ticks = -(-weight // self._interval_ns)
        dynamo = self.set_eval_frame
        if dynamo is None:
            recorder.guarded(self._add, frame, tick_ns, weight, ticks)
        else:
            # The signal may land in a region that Dynamo watches, where every frame counts as the script's.
            callback = dynamo(None)
            recorder.guarded(self._add, frame, tick_ns, weight, ticks)
            dynamo(callback)
        self.count += 1
        self.cost_ns += thread_time_ns() - begun + SIGNAL_NS

    def _add(self, frame: FrameType | None, tick_ns: int, weight_ns: int, ticks: int) -> None:
        recorder = self._recorder
        key = user_stack(recorder.current, frame)
        recorder.log.sampled.append((tick_ns, weight_ns, ticks, key))
        self.writes.look(key[0], key[1:])
        now, cpu_ns = monotonic_ns(), thread_time_ns()
        passed_ns, used_ns = now - self._taken_ns, cpu_ns - self._cpu_ns
        self._taken_ns, self._cpu_ns = now, cpu_ns
        before, self._place = self._place, (key, recorder.steps)
        if before != self._place:  # some of it passed elsewhere, less than an interval
            passed_ns, used_ns = passed_ns - self._interval_ns, max(0, used_ns - self._interval_ns)
        if before == self._place or ticks > 1:
            self.stood.append((key[1:], passed_ns, max(0, passed_ns - used_ns)))
