"""Whose an exception is that comes out of a place where our code and the script's call each other."""

from __future__ import annotations

from pathlib import Path

import diagnose

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
