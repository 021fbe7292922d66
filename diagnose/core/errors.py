"""What a user can act on."""

from __future__ import annotations


class DiagnoseError(Exception):
    """A condition the user can mend.

    The command line prints the message alone, without a traceback, and exits 2. The message says
    what happened, with the name and the numbers, then what to do.
    """


SHORT_OF_MEMORY = frozenset({"OutOfMemoryError", "MemoryError"})
"""Exceptions of torch's and of Python's that say so, by name."""

SHORT_OF_MEMORY_IN_WORDS = (
    "unable to find an engine to execute this computation",  # cuDNN: each plan's workspace was refused
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_ALLOC_FAILED",  # a handle is made outside of torch's pool, which has everything
    "CUDA error: out of memory",
)
"""How torch says it in a plain `RuntimeError`. The first is also what a convolution gets that cuDNN does
not know: who computes again with less memory then meets the same error once more."""


def is_short_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was too little memory, of a device or of the host."""
    if not SHORT_OF_MEMORY.isdisjoint(kind.__name__ for kind in type(error).__mro__):
        return True
    words = str(error) if isinstance(error, RuntimeError) else ""
    return any(each in words for each in SHORT_OF_MEMORY_IN_WORDS)
