"""Ctrl-C waits while something is half done; what other handlers of the script raise gets to the script."""

from __future__ import annotations

# What `signal` wraps: that turns each handler into an enumeration and back, 20 us of every tuned step.
import _signal  # type: ignore[import-not-found]
import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

OTHERS = tuple(int(number) for number in signal.valid_signals() if number != signal.SIGINT)

Handler = Callable[[int, "FrameType | None"], Any]


_waiting: dict[int, Callable[[], Any]] | None = None
"""Calls of the script's handlers that are put off, by signal; `None` while they run at once."""


class FromHandler(BaseException):
    """Stands for an `Exception` that a handler of the script's has raised: it is not for whoever catches
    what fails in the code that was interrupted."""


@contextmanager
def interrupts_wait() -> Iterator[Sequence[object]]:
    """Holds back the script's handler of Ctrl-C until the context is left, and calls it then.

    In the middle of a fork Python swallows a `KeyboardInterrupt`, and in the middle of a change it would
    leave half of it behind. Handlers of other signals run at once, as a scheduler may give the script but
    seconds; an exception that one raises leaves the context, whatever is caught inside
    (`handlers_wait` lets them wait, too). Does nothing outside the main thread, where no handler ever runs.

    Yields:
        What is not empty once Ctrl-C was pressed: whoever waits for something in between must give up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield ()
        return
    arrived: list[FrameType | None] = []
    raised: list[Exception] = []

    def hold(number: int, frame: FrameType | None) -> None:
        arrived.append(frame)

    handler = _signal.getsignal(_signal.SIGINT)
    stand_ins: dict[int, tuple[Handler, Handler]] = {}
    if callable(handler):
        stand_ins[_signal.SIGINT] = (hold, handler)
    for number in OTHERS:
        other = _signal.getsignal(number)
        if callable(other) and _is_the_scripts(other):
            stand_ins[number] = (_noting(other, raised), other)
    for number, (stand_in, _) in stand_ins.items():
        _signal.signal(number, stand_in)
    try:
        yield arrived
    except FromHandler:
        """Raised again below, as what it was."""
    finally:
        for number, (stand_in, theirs) in stand_ins.items():
            if _signal.getsignal(number) is stand_in:
                _signal.signal(number, theirs)
        if arrived:
            handler(_signal.SIGINT, arrived[0])
    if raised:
        raise raised[0]


@contextmanager
def handlers_wait() -> Iterator[None]:
    """Inside of `interrupts_wait`: puts off what the script's other handlers do until the context is left.

    For as long as the model is not as the script knows it, and a handler may save it.
    """
    global _waiting
    _waiting = {}
    try:
        yield
    finally:
        waiting, _waiting = _waiting, None
        with ExitStack() as calls:  # each is called, whatever another one raises
            for call in reversed(waiting.values()):
                calls.callback(call)


def _is_the_scripts(handler: Any) -> bool:
    """Whether neither we nor torch have set it: torch's tells of workers that died, ours among them."""
    return str(getattr(handler, "__module__", "")).partition(".")[0] not in ("diagnose", "torch")


def _noting(handler: Handler, raised: list[Exception]) -> Handler:
    """Returns a handler that calls the script's, and notes what it raises."""
    process = os.getpid()

    def call(number: int, frame: FrameType | None) -> None:
        if _waiting is not None and os.getpid() == process:
            _waiting.setdefault(number, functools.partial(call, number, frame))
            return
        try:
            handler(number, frame)
        except Exception as error:
            if _signal.getsignal(number) is not call or os.getpid() != process:
                raise  # torch has kept it for later, or it was inherited
            raised.append(error)
            raise FromHandler from error

    return call
