"""Whose an exception is that comes out of a place where our code and the script's call each other."""

from __future__ import annotations

from pathlib import Path

import diagnose
from diagnose.hooks._signals import from_signal_handler

PACKAGE = str(Path(diagnose.__file__).parent)


def raised_by_us(error: BaseException) -> bool:
    """Whether a line of this package raised it, or something built in that the line called.

    What the script raises, or torch where it does the script's work, is the script's: it must see that.
    What torch raises in work of ours cannot be told from it.
    """
    trace = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code.co_filename.startswith(PACKAGE)


def raised_by_handler(error: BaseException) -> BaseException | None:
    """Returns what a signal handler of the script's has raised, if this is it, or what torch's compiler has
    made of it: that wraps what it meets in exceptions of its own."""
    found: BaseException | None = error
    while found is not None and type(found).__module__.partition(".")[0] == "torch":
        found = found.__cause__ or found.__context__
    return found if found is not None and from_signal_handler(found.__traceback__) else None
