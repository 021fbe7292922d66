"""A process that tells whether a signal was sent to us alone or to our whole process group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from collections.abc import Collection

ARRIVES_WITHIN_S = 0.02
"""A signal to a group reaches its members one by one, within microseconds."""

ANSWERS_WITHIN_S = 1.0
"""A witness that is stopped does not answer. Then a signal twice is better than none."""


MOST_FILES = 1 << 16


class Witness:
    """A forked process of our group that lets signals wait, and is asked whether one has come to it, too.

    `kill %1` of a shell, `timeout`, systemd and batch systems send to all; the script then has the signal
    already. Nothing else tells: both have the same sender and the same code. It ends when we do.

    Args:
        signals: Those that may be asked about. The caller must have a handler for each of them.
    """

    def __init__(self, signals: Collection[int]) -> None:
        asked, self._ask = os.pipe()
        self._answer, told = os.pipe()
        self._answers = True
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        self._pid = os.fork()
        if not self._pid:
            _serve(asked, told)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(asked)
        os.close(told)

    def close(self) -> None:
        """Ends it."""
        os.close(self._ask)
        os.close(self._answer)
        os.kill(self._pid, signal.SIGKILL)  # it may be stopped
        os.waitpid(self._pid, 0)

    def has(self, number: int) -> bool:
        """Whether the signal that we just got has come to it as well. Each is told of once."""
        with contextlib.suppress(OSError):
            if self._answers:
                os.write(self._ask, bytes([number]))
                if select.select([self._answer], [], [], ANSWERS_WITHIN_S)[0]:
                    return os.read(self._answer, 1) == b"y"
                self._answers = False  # a late answer would be taken for that to the next question
        return False


def _serve(asked: int, told: int) -> None:
    """Answers until nobody can ask any more; never returns."""
    try:
        if min(asked, told):  # of an empty range from 0 on Python closes all
            os.closerange(0, min(asked, told))  # a reader of our output is not to wait for this process
        os.closerange(min(asked, told) + 1, max(asked, told))
        os.closerange(max(asked, told) + 1, MOST_FILES)
        while number := os.read(asked, 1):
            came = signal.sigtimedwait([number[0]], ARRIVES_WITHIN_S)
            os.write(told, b"n" if came is None else b"y")
    finally:
        os._exit(0)
