"""How much a thread has read, page cache included."""

from __future__ import annotations

import os

MAX_TEXT = 256
"""Bytes that hold the kernel's first three numbers, and more."""


def read_so_far() -> tuple[int, int] | None:
    """Returns the bytes that the calling thread has read so far, and the system calls that read them;
    `None` where the kernel does not tell.

    The file is opened anew: after a fork, or in another thread, one that is open would tell of the old one.
    Some 20 us.
    """
    try:
        file = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
        try:
            fields = os.pread(file, MAX_TEXT, 0).split()  # rchar: 1 wchar: 2 syscr: 3 ...
        finally:
            os.close(file)
        return int(fields[1]), int(fields[5])
    except (OSError, IndexError, ValueError):
        return None
