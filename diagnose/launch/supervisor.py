"""Waits for the script's process, passes signals on to it, and ends as it ended."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from diagnose.launch.witness import Witness

NAMES = """
    SIGINT SIGTERM SIGHUP SIGQUIT SIGUSR1 SIGUSR2 SIGXCPU SIGALRM SIGVTALRM SIGPROF SIGIO SIGPWR
"""
PASSED_ON = (
    *(getattr(signal, name) for name in NAMES.split() if hasattr(signal, name)),
    *(range(signal.SIGRTMIN, signal.SIGRTMAX + 1) if hasattr(signal, "SIGRTMIN") else ()),
)
"""Signals that end a process which has not asked for them: batch systems send one or the other, for the
script to save what it has. Those of a fault are nobody's to send."""

WITH_A_KEY = {signal.SIGINT, signal.SIGQUIT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """How a process ended: with an exit code, or by a signal."""

    exit_code: int | None = None
    signal: int | None = None


def supervise(
    command: Sequence[str], environment: Mapping[str, str], *, beside: Callable[[], None]
) -> Fate:
    """Runs a command to its end, with this process's own stdin, stdout, stderr and further open files.

    On return a signal is noted and otherwise ignored, save those that were ignored before.

    Args:
        command: Program and arguments.
        environment: Its environment.
        beside: Called in a thread of its own, which takes no signal, once the command runs. Nobody waits
            for its end.

    Raises:
        OSError: If the command cannot be started.
    """
    early: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        early.append(number)

    # Handlers of ours become the default again in the child; an ignored signal would stay ignored there.
    # What was ignored when we were started (nohup, a job in the background) stays so for us and the child.
    watched = {number for number in PASSED_ON if signal.getsignal(number) is not signal.SIG_IGN}
    for number in watched:
        signal.signal(number, note)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it takes the child's exit code with it
    if hasattr(signal, "sigwaitinfo"):
        with contextlib.closing(Witness(watched)) as witness:
            child = subprocess.Popen(command, env=environment, close_fds=False)
            _wait_for_signals(child, watched, early, beside, witness)
    else:
        child = subprocess.Popen(command, env=environment, close_fds=False)
        _begin(beside)
        _wait_with_handlers(child, watched)
    if child.returncode < 0:
        return Fate(signal=-child.returncode)
    return Fate(exit_code=child.returncode)


def _begin(beside: Callable[[], None]) -> None:
    threading.Thread(target=beside, name="diagnose-beside", daemon=True).start()


def _wait_for_signals(
    child: subprocess.Popen[bytes],
    watched: set[int],
    early: list[int],
    beside: Callable[[], None],
    witness: Witness,
) -> None:
    """Takes signals one by one, with their origin, instead of being interrupted by them.

    They are blocked only now: a blocked signal would be blocked in the child too.
    """
    awaited = {*watched, signal.SIGCHLD}
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    _begin(beside)  # the thread has them blocked, too
    for number in early:
        witness.has(number)  # which it may have had before the script began
        child.send_signal(number)
    while child.poll() is None:
        arrived = signal.sigwaitinfo(awaited)
        if arrived.si_signo not in watched:
            continue
        to_all = witness.has(arrived.si_signo)
        if not (to_all and _is_in_our_group(child.pid)):
            child.send_signal(arrived.si_signo)
    while signal.sigtimedwait(awaited, 0) is not None:
        pass  # what was meant for the script, and came too late for it
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)


def _is_in_our_group(script: int) -> bool:
    try:
        return os.getpgid(script) == os.getpgrp()
    except ProcessLookupError:
        return True


def _wait_with_handlers(child: subprocess.Popen[bytes], watched: set[int]) -> None:
    """The same where no one tells who sent a signal: one with a key is taken to come from the terminal."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    for number in watched:
        signal.signal(number, _drop if number in WITH_A_KEY else pass_on)
    child.wait()
    for number in watched:
        signal.signal(number, _drop)


def _drop(number: int, frame: FrameType | None) -> None:
    pass


def end_as(fate: Fate) -> NoReturn:
    """Ends this process with the exit code, or by the signal, that ended the script.

    Shells, Slurm and `set -e` then see what they would have seen without us.
    """
    if fate.signal is not None:
        _die_by(fate.signal)
    for stream in (sys.stdout, sys.stderr):
        # Closed, or nobody reads it: no reason to change the exit code.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    # Nothing is left to clean up; a normal exit would unload every library first.
    os._exit(fate.exit_code if fate.exit_code is not None else 128 + (fate.signal or 0))


def _die_by(number: int) -> None:
    """Returns only where the signal has no effect, such as for the first process of a container."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the script has left its core; ours helps nobody
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
