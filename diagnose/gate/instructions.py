"""Instructions that a run executed, where the kernel lets `perf` count them.

Neighbours do not change how many there are, save in loops that spin while they wait.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sys
from pathlib import Path

EVENT = "instructions:u"

ENDS_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
"""Asks Linux to end `perf` with SIGTERM when the gate dies, which then ends what `perf` runs: that asks for
the same, of `perf`, its parent."""


def counting(destination: Path) -> list[str]:
    """Returns what to put before a command to count its instructions; nothing where it cannot be done.

    Args:
        destination: File for the counts.
    """
    perf = _perf()
    if perf is None:
        return []
    wrapper = [sys.executable, "-I", "-S", "-c", ENDS_WITH_US]
    return [*wrapper, perf, "stat", "-x", ",", "-e", EVENT, "-o", str(destination), "--"]


def count_of(counts: Path) -> float | None:
    """Returns the number that `counting` left in a file, of the command and all its children."""
    try:
        lines = counts.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return _count(lines)


@functools.cache
def _perf() -> str | None:
    """Returns the path of a `perf` that counts: many may not, and many virtual CPUs cannot."""
    perf = shutil.which("perf")
    if perf is None:
        return None
    command = [perf, "stat", "-x", ",", "-e", EVENT, "true"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return perf if tried.returncode == 0 and _count(tried.stderr.splitlines()) is not None else None


def _count(lines: list[str]) -> float | None:
    """Finds the count among lines such as `123456,,instructions:u,100,100.00,,`."""
    for line in lines:
        fields = line.split(",")
        if len(fields) > 2 and fields[2].startswith(EVENT.partition(":")[0]):
            with contextlib.suppress(ValueError):  # `<not supported>`
                return float(fields[0])
    return None
