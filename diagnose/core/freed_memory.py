"""How glibc is told to keep the memory that a script frees: by variables, and by a line of the script."""

from __future__ import annotations

import os

ROOM = 1 << 30
"""Bytes that may lie free, and of the largest block that is kept. More than that lies free in few steps,
and goes back as before."""

MOST_OF_OLDER = 32 << 20
"""The same of a block before glibc 2.35, which does not hear of more. It still hears of the free bytes, and
then no longer raises the other threshold by itself: each block of 128 KiB would be mapped anew."""


def most_kept() -> int:
    """Returns the bytes of the largest block that this C library can be told to keep."""
    try:
        _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        major, minor = map(int, version.split(".")[:2])
    except (ValueError, OSError, AttributeError):  # another C library
        return ROOM
    return MOST_OF_OLDER if (major, minor) < (2, 35) else ROOM


def as_variables() -> dict[str, str]:
    """Returns what to set in the environment."""
    return {"MALLOC_TRIM_THRESHOLD_": str(ROOM), "MALLOC_MMAP_THRESHOLD_": str(most_kept())}


def as_statement() -> str:
    """Returns the same for a script."""
    mallopt = "ctypes.CDLL(None).mallopt"
    free, mapped = (size.bit_length() - 1 for size in (ROOM, most_kept()))
    return f"import ctypes; {mallopt}(-1, 1 << {free}); {mallopt}(-3, 1 << {mapped})"
