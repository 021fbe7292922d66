"""Tells what a signal handler of the script's raised from what our own code did."""

from __future__ import annotations

import signal
from types import TracebackType


def from_signal_handler(trace: TracebackType | None) -> bool:
    """Whether an exception came out of a handler, not ours, that is installed for a signal."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = [
        getattr(handler, "__code__", None)
        for handler in handlers
        if not getattr(handler, "__module__", "").startswith("diagnose.")
    ]
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
