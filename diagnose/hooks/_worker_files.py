"""Which lines of a worker open files, how many for a batch, and how much it reads, page cache included.

What the page cache holds is read without waiting, on a CPU: neither CPU time nor the bytes from a disk tell
it from computing.
"""

from __future__ import annotations

import os
import sys
from threading import get_ident
from typing import Any

from diagnose.hooks._frames import user_frame
from diagnose.hooks._recorder import Recorder
from diagnose.hooks._worker_readings import bytes_of

MAX_PLACES = 256
"""Files opened for one batch of which it is found out where; the batch's samples are much alike."""

MAX_LINES = 8
"""Lines told, those that open most files first."""


class Files:
    """The files that a worker's main thread opens for a few of its batches, and the bytes that it reads.

    An audit hook hears of files, whichever package opens them in Python. Python takes none away again, so
    only a process that ends as a worker may have one of these.

    Args:
        recorder: Notes what goes wrong in it.

    Attributes:
        batches: Batches looked into.
        samples: Samples in them; `None` once the indices of a batch did not say.
        opens: Files opened for them, but to be written.
        reads: System calls that read for them; `None` where the kernel does not tell.
        read_bytes: Bytes that these read; likewise.
        made_bytes: Bytes of the batches; `None` once one had too many parts.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.batches = self.opens = 0
        self.samples: int | None = 0
        self.reads: int | None = 0
        self.read_bytes: int | None = 0
        self.made_bytes: int | None = 0
        self._places: dict[tuple[int, int], int] = {}
        self._recorder = recorder
        self._left = 0
        self._made = False
        self._read_mark = (0, 0)
        self._asked: Any = None
        self._thread = 0  # that is listened to
        try:
            self._file = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file, self.reads, self.read_bytes = -1, None, None
        sys.addaudithook(self._heard)

    def asked(self, indices: Any) -> None:
        """The worker begins to fetch these indices: a list, or one of them for a whole batch."""
        self._asked = indices

    def begins(self) -> None:
        """The worker begins a batch that is to be looked into."""
        self._left = MAX_PLACES
        self._read_mark = self._read_now()
        self._thread = get_ident()

    def ends(self) -> None:
        """The worker has made a batch. Any that was not to be looked into costs a comparison."""
        if not self._thread:
            return
        self._thread = 0
        self.batches += 1
        if self.reads is not None and self.read_bytes is not None:
            read, calls = self._read_now()
            self.read_bytes += read - self._read_mark[0]
            self.reads += calls - self._read_mark[1] - 1  # the first look's own
        if self.samples is not None:
            self.samples = self.samples + len(self._asked) if isinstance(self._asked, list) else None
        self._made = True

    def made(self, batch: Any) -> None:
        """The worker is about to send this batch."""
        if self._made:
            self._made = False
            num_bytes = bytes_of(batch)
            if num_bytes is None or self.made_bytes is None:
                self.made_bytes = None
            else:
                self.made_bytes += num_bytes

    def opening(self) -> list[tuple[tuple[int, int], int]]:
        """Returns where most files were opened, as `user_frame` has it, and how many of them."""
        return sorted(self._places.items(), key=lambda item: -item[1])[:MAX_LINES]

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self._thread and get_ident() == self._thread and not writes_only(args):
            self._recorder.guarded(self._opened)

    def _opened(self) -> None:
        self.opens += 1
        if self._left:
            self._left -= 1
            place = user_frame(sys._getframe(1))
            if place is not None:
                self._places[place] = self._places.get(place, 0) + 1

    def _read_now(self) -> tuple[int, int]:
        # rchar: 1 wchar: 2 syscr: 3 ... Read from an open file: a few microseconds.
        fields = os.pread(self._file, 128, 0).split() if self._file >= 0 else ()
        return (int(fields[1]), int(fields[5])) if fields else (0, 0)


def writes_only(args: tuple[Any, ...]) -> bool:
    """Whether a file is opened to be written alone: path, mode and flags of Python's `open` or the
    system's."""
    flags = args[2] if len(args) > 2 else None
    return isinstance(flags, int) and flags & os.O_ACCMODE == os.O_WRONLY
