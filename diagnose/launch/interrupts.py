"""Ctrl-C waits while something is half done."""

from __future__ import annotations

# What `signal` wraps: that turns each handler into an enumeration and back, 20 us of every tuned step.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_wait() -> Iterator[Sequence[object]]:
    """Holds back the script's handler of Ctrl-C until the context is left, and calls it then.

    In the middle of a fork Python swallows a `KeyboardInterrupt`, and in the middle of a change it would
    leave half of it behind. Does nothing outside the main thread, where no handler ever runs, and where the
    script ignores Ctrl-C.

    Yields:
        What is not empty once Ctrl-C was pressed: whoever waits for something in between must give up.
    """
    handler = _signal.getsignal(_signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield ()
        return
    arrived: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        arrived.append(frame)

    _signal.signal(_signal.SIGINT, hold)
    try:
        yield arrived
    finally:
        if _signal.getsignal(_signal.SIGINT) is hold:
            _signal.signal(_signal.SIGINT, handler)
        if arrived:
            handler(_signal.SIGINT, arrived[0])
