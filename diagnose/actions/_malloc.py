"""The two thresholds by which the GNU C library gives memory back to the system."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from diagnose.actions.base import CannotApply

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, as in glibc's `malloc.h`."""

LEAST, MOST = 128 << 10, 32 << 20
"""Where glibc lets its threshold for mapping a block of its own begin and end, on 64 bits."""

FINER = 1.03
"""The threshold is found so exactly: a probe that is mapped and freed raises it by no more."""

MAPPED = 0b10
"""The bit of a block's size field, which lies before the block, that says that it was mapped."""

NOT_MAIN = 0b100
"""The bit that says that the block is of an arena other than the heap: those end once they are free."""

ELSEWHERE = 5000
"""Bytes of a block that is of the arena that large ones are of: no list of the thread's own keeps such."""

FITTING = 4 << 30
"""Bytes of free blocks that a search uses up at most."""

SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")


def library() -> Any:
    """Returns the C library.

    Raises:
        CannotApply: If it is not glibc, another allocator takes its place, or the user has set it up.
    """
    if not sys.platform.startswith("linux") or sys.maxsize < 1 << 32:
        raise CannotApply("only glibc on 64-bit Linux is known to give memory back so")
    for name, value in os.environ.items():
        if name in SETTINGS or (name == "GLIBC_TUNABLES" and "malloc" in value):
            raise CannotApply(f"{name} is set: the allocator is set up already")
    process = ctypes.CDLL(None)
    try:
        glibc = ctypes.CDLL("libc.so.6")
        glibc.gnu_get_libc_version  # noqa: B018 -- musl has no such function
    except (OSError, AttributeError):
        raise CannotApply("the C library is not glibc") from None
    if _address(process.malloc) != _address(glibc.malloc):
        raise CannotApply("another allocator takes the place of glibc's")
    glibc.malloc.argtypes, glibc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    glibc.free.argtypes, glibc.free.restype = [ctypes.c_void_p], None
    glibc.sbrk.argtypes, glibc.sbrk.restype = [ctypes.c_ssize_t], ctypes.c_void_p
    block = glibc.malloc(ELSEWHERE)
    elsewhere = not block or _size_field(block) & NOT_MAIN
    glibc.free(block)
    if elsewhere:  # the thread is not the main one, or was once refused memory
        raise CannotApply(
            "the memory of the training thread does not lie in the heap: it would not be kept"
        )
    return glibc


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def mapped_from(glibc: Any) -> int:
    """Returns from how many bytes on a block gets a mapping of its own, which ends with it.

    glibc raises this threshold to the largest mapped block that was freed, up to 32 MiB, and tells nobody.
    So blocks are asked for, ever larger ones, until one is mapped. Their memory is not touched.

    Raises:
        CannotApply: If too much memory lies free to find out, or the script has moved the threshold itself.
    """
    held: list[int] = []
    try:
        size = LEAST
        while size < MOST:
            if _is_mapped(glibc, size, held):
                return size
            size = int(FINER * size)
        if not _is_mapped(glibc, MOST + LEAST, held):
            raise CannotApply("the script has set the allocator up itself")
        return MOST
    finally:
        for block in reversed(held):
            glibc.free(block)


def _is_mapped(glibc: Any, size: int, held: list[int]) -> bool:
    """Whether a block of this size is mapped where no free one fits; those that do are added to `held`."""
    for _ in range(FITTING // size):
        end_of_heap = glibc.sbrk(0)
        block = glibc.malloc(size)
        is_mapped = not block or bool(_size_field(block) & MAPPED)
        if is_mapped or glibc.sbrk(0) != end_of_heap:
            glibc.free(block)
            return is_mapped
        held.append(block)
    raise CannotApply("too much memory lies free to tell when any goes back")


def _size_field(block: int) -> int:
    return ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value


class FreedMemory:
    """What the process frees: given back to the system, as it was, or kept.

    Args:
        room: Bytes that may lie free before any goes back, while it is kept, and of the largest block that
            is kept.
    """

    def __init__(self, glibc: Any, room: int) -> None:
        self._glibc = glibc
        self._room = room
        self._threshold = mapped_from(glibc)
        self._plugs: list[int] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps what is freed for what is asked for next. Both thresholds are put back to where they were,
        and what lay free goes back to the system."""
        try:
            self.unplug()
            self._set(self._room, self._room)
            yield
        finally:
            self._set(2 * self._threshold, self._threshold)  # glibc keeps the former at twice the latter
            self._plug()

    def unplug(self) -> None:
        """Lets all blocks be used again."""
        while self._plugs:
            self._glibc.free(self._plugs.pop())

    def _plug(self) -> None:
        """Takes the large blocks that now lie free within the heap, and none of their pages: the next large
        one is mapped, as it was before there were any."""
        self._glibc.malloc_trim(0)
        size = self._room
        with suppress(CannotApply):  # there are more of them than are worth it
            while size >= self._threshold:
                _is_mapped(self._glibc, size, self._plugs)  # uses up those that fit
                size //= 2

    def _set(self, trim: int, mapped: int) -> None:
        if not self._glibc.mallopt(M_TRIM_THRESHOLD, trim):
            raise CannotApply("glibc does not take the setting")
        if not self._glibc.mallopt(M_MMAP_THRESHOLD, mapped):
            self._glibc.mallopt(M_MMAP_THRESHOLD, MOST)  # an older one takes no more
