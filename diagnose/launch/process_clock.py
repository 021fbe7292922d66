"""When a process started, from the kernel's own record."""

from __future__ import annotations

import os
import time


def started_unix(pid: int) -> float | None:
    """Returns when a process started, in seconds since 1970; `None` where the system does not tell.

    Whoever asks about a process gets the same number, so that several can name one thing after it. It may
    be off by a second: the kernel gives the time of its own start in whole seconds.
    """
    after_boot_s = _started_after_boot_s(pid)
    if after_boot_s is None:
        return None
    try:
        with open("/proc/stat", "rb") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith(b"btime"))
    except (OSError, StopIteration):
        return None
    return boot + after_boot_s


def own_age_s() -> float:
    """Returns how long this process has lived, to a hundredth of a second."""
    after_boot_s = _started_after_boot_s(os.getpid())
    if after_boot_s is None:
        return time.process_time()  # a process that never waited has worked for as long as it has lived
    return time.clock_gettime(time.CLOCK_BOOTTIME) - after_boot_s


def _started_after_boot_s(pid: int) -> float | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of the program, in parentheses, may itself hold blanks and parentheses.
            ticks = int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
