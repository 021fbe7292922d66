"""Running totals that the operating system keeps of this process, read in the flusher's thread."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

Readings = dict[str, int]
"""Running totals by name. A name that is absent could not be read here."""


def read(training_thread: int) -> Readings:
    """Reads what can be read; Linux only.

    Args:
        training_thread: `threading.get_ident()` of the thread that trains.

    Returns:
        `cpu_ns`: CPU time of all threads of this process. `thread_cpu_ns`: of the training thread.
        `thread_delay_ns`: time that the training thread was ready to run and had no CPU.
    """
    if not sys.platform.startswith("linux"):
        return {}
    times = os.times()
    readings = {"cpu_ns": round((times.user + times.system) * 1e9)}
    native = next((t.native_id for t in threading.enumerate() if t.ident == training_thread), None)
    try:
        on_cpu, delay, _ = Path(f"/proc/self/task/{native}/schedstat").read_text().split()
    except (OSError, ValueError):
        return readings
    return {**readings, "thread_cpu_ns": int(on_cpu), "thread_delay_ns": int(delay)}
