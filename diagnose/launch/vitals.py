"""Running totals that the operating system keeps of this process, read in the flusher's thread.

A reading takes about 0.2 ms, most of it spent opening small files of `/proc`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from diagnose.launch import quota

Readings = dict[str, Any]
"""Running totals by name. A name that is absent could not be read here."""

MAX_THREADS = 24
"""Threads of the script, and as many of torch's, that are read one by one; the rest are not."""

MAX_CHILDREN = 32

OURS = "diagnose-"
"""How the names of our own threads begin."""

CPU_LINES_BYTES = 1 << 16
"""Of `/proc/stat`: its lines on CPUs, those of a machine of several hundred too, come first."""

FULL = 0.95
"""Part of the time that makes a core count as busy all the time: ticks are counted in hundredths."""


def read(training_thread: int) -> Readings:
    """Reads what can be read; Linux only.

    Args:
        training_thread: `threading.get_ident()` of the thread that trains.

    Returns:
        `cpu_ns`: CPU time of all threads of this process. `thread_cpu_ns`: of the training thread.
        `thread_system_ns`: what of it passed in the kernel.
        `thread_delay_ns`: time that the training thread was ready to run and had no CPU.
        `voluntary`, `involuntary`: how often it gave its CPU up, or had it taken.
        `native_delay_ns`: `thread_delay_ns` of threads that are not Python's, such as torch's, together.
        `python_threads`: name, file, line and CPU nanoseconds of each other Python thread, by native id.
        `child_cpu_ns`: CPU time of this process's children, such as DataLoader workers.
        `kernel_ns`: CPU time that the kernel worked for this process and its children.
        `machine_busy_ns`, `machine_stolen_ns`: CPU time of all processes, and that other guests took.
        `machine_kernel_ns`: what of it passed in the kernel, whomever that worked for.
        `machine_iowait_ns`: CPU time that was idle while some process waited for a disk.
        `busiest_core_share`, `full_cores`: of the CPUs that this process may use, since the last reading,
        the busy time of the busiest, and how many were busy all the time.
        `major_faults`: page faults that needed the disk. `minor_faults`: those that did not.
        `swapped_bytes`, `resident_bytes`: as they stand.
        `own_bytes`: of the latter, what no file backs.
        `read_bytes`, `written_bytes`: what this process has had read from storage, beyond the page cache,
        and written to it, without its children.
        `memory_stall_ns`: time in which some task of the machine waited for memory.
        `anomaly`, `profiler`: 1 where torch's anomaly detection or profiler is on.
        `periods`, `throttled`, `throttled_ns`: of the control group's CPU quota; `quota`: its CPUs.
    """
    if not sys.platform.startswith("linux"):
        return {}
    readings: Readings = {"cpu_ns": time.process_time_ns()}
    threads = {_native(thread): thread for thread in threading.enumerate()}
    training = next((native for native, thread in threads.items() if thread.ident == training_thread), None)
    parts: tuple[Callable[[], Mapping[str, Any]], ...] = (
        lambda: _training(training),
        lambda: _others(threads, training),
        lambda: _children(training),
        _machine,
        _memory,
        _modes,
        quota.read,
    )
    for part in parts:
        # Whatever this kernel, or container, does not tell stays away.
        with contextlib.suppress(OSError, ValueError, IndexError, KeyError):
            readings.update(part())
    return readings


def _native(thread: threading.Thread) -> int | None:
    """Returns the thread's id in the kernel; a fork's main thread bears its parent's (Python 3.11)."""
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def _text(path: str, num_bytes: int = 16384) -> str:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, num_bytes).decode()
    finally:
        os.close(descriptor)


def _training(native: int | None) -> Mapping[str, int]:
    on_cpu, delay, _ = _text(f"/proc/self/task/{native}/schedstat").split()
    system = int(_text(f"/proc/self/task/{native}/stat").rpartition(")")[2].split()[12])
    totals = {
        "thread_cpu_ns": int(on_cpu),
        "thread_delay_ns": int(delay),
        "thread_system_ns": system * 1_000_000_000 // os.sysconf("SC_CLK_TCK"),
    }
    status = _fields(_text(f"/proc/self/task/{native}/status"))
    return {
        **totals,
        "voluntary": int(status["voluntary_ctxt_switches"]),
        "involuntary": int(status["nonvoluntary_ctxt_switches"]),
        "resident_bytes": _kib(status["VmRSS"]),
        "own_bytes": _own_bytes(status),
        "swapped_bytes": _kib(status["VmSwap"]),
    }


def _own_bytes(status: Mapping[str, str]) -> int:
    """Returns the resident memory that no file backs: pages of a mapped file can be dropped at any time."""
    if "RssAnon" not in status:  # before Linux 4.5
        return _kib(status["VmRSS"])
    return _kib(status["RssAnon"]) + _kib(status["RssShmem"])


def _others(threads: Mapping[int | None, threading.Thread], training: int | None) -> Mapping[str, Any]:
    """Reads the script's other Python threads, and those that are not Python's."""
    python: dict[str, Any] = {}
    delay_ns = read = 0
    for name in os.listdir("/proc/self/task"):
        native = int(name)
        thread = threads.get(native)
        if native == training or (thread is not None and thread.name.startswith(OURS)):
            continue
        try:
            if thread is not None and len(python) < MAX_THREADS:
                python[name] = [*_named(thread), int(_text(f"/proc/self/task/{name}/schedstat").split()[0])]
            elif thread is None and read < MAX_THREADS:
                read += 1
                delay_ns += int(_text(f"/proc/self/task/{name}/schedstat").split()[1])
        except (OSError, IndexError):
            continue  # it has just ended
    return {"python_threads": python, "native_delay_ns": delay_ns}


def _named(thread: threading.Thread) -> tuple[str, str, int]:
    """Returns a thread's name, and where the function that it runs begins."""
    function = getattr(thread, "_target", None) or type(thread).run
    function = getattr(function, "func", function)  # a partial
    code = getattr(function, "__code__", None)
    return (
        (thread.name, code.co_filename, code.co_firstlineno) if code is not None else (thread.name, "", 0)
    )


def _children(training: int | None) -> Mapping[str, int]:
    """Reads the CPU time of those that live and of those that have ended: it only grows."""
    times = os.times()
    ticks = os.sysconf("SC_CLK_TCK")
    total_ns = round((times.children_user + times.children_system) * 1e9)
    kernel_ns = round((times.system + times.children_system) * 1e9)
    for pid in _text(f"/proc/self/task/{training}/children").split()[:MAX_CHILDREN]:
        try:
            fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        user, system, user_of_theirs, system_of_theirs = map(int, fields[11:15])
        kernel = system + system_of_theirs
        total_ns += (user + user_of_theirs + kernel) * 1_000_000_000 // ticks
        kernel_ns += kernel * 1_000_000_000 // ticks
    return {"child_cpu_ns": total_ns, "kernel_ns": kernel_ns}


def _machine() -> Mapping[str, float]:
    """Reads user, nice, system, idle, iowait, irq, softirq and steal of all CPUs, in ticks."""
    text = _text("/proc/stat", CPU_LINES_BYTES)
    ticks = [int(field) for field in text.split(maxsplit=10)[1:9]]
    tick_ns = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return {
        "machine_busy_ns": _busy(ticks) * tick_ns,
        "machine_kernel_ns": (ticks[2] + ticks[5] + ticks[6]) * tick_ns,
        "machine_stolen_ns": ticks[7] * tick_ns,
        "machine_iowait_ns": ticks[4] * tick_ns,
        **_cores.read(text),
    }


def _busy(ticks: Sequence[int]) -> int:
    return ticks[0] + ticks[1] + ticks[2] + ticks[5] + ticks[6]


class _Cores:
    """Each core's use between two readings: one that is full hides in a mean over many."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[int, int]] = {}

    def read(self, text: str) -> Mapping[str, float]:
        """Reads the lines of single CPUs in `/proc/stat`."""
        now: dict[int, tuple[int, int]] = {}
        allowed = os.sched_getaffinity(0)
        for line in text.splitlines()[1:]:
            if not line.startswith("cpu"):
                break
            name, *fields = line.split()
            if int(name[3:]) in allowed:
                ticks = [int(field) for field in fields[:8]]
                now[int(name[3:])] = _busy(ticks), sum(ticks)
        before, self._before = self._before, now
        shares = [
            (busy - before[core][0]) / (all_ticks - before[core][1])
            for core, (busy, all_ticks) in now.items()
            if core in before and all_ticks > before[core][1]
        ]
        if not shares:
            return {}
        return {
            "busiest_core_share": round(max(shares), 3),
            "full_cores": sum(share >= FULL for share in shares),
        }


_cores = _Cores()


def _memory() -> Mapping[str, int]:
    fields = _text("/proc/self/stat").rpartition(")")[2].split()
    readings = {"minor_faults": int(fields[7]), "major_faults": int(fields[9])}
    with contextlib.suppress(OSError, ValueError, KeyError):  # a container that hides it
        readings.update(_moved.read())
    try:
        some = _text("/proc/pressure/memory").split()
        readings["memory_stall_ns"] = 1000 * int(some[4].partition("=")[2])
    except (OSError, ValueError, IndexError):
        pass  # a kernel without pressure accounting
    return readings


class _Moved:
    """What the threads of this process read from storage and wrote to it. The kernel's own sum also has
    what children did, once they have ended and were waited for: the workers of each epoch."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[int, int]] = {}
        self._read = self._written = 0

    def read(self) -> Mapping[str, int]:
        """Reads the totals of single threads; what one does that comes and goes in between is lost.

        Raises:
            OSError: If this container hides them.
        """
        now: dict[str, tuple[int, int]] = {}
        for name in os.listdir("/proc/self/task")[: 2 * MAX_THREADS]:
            try:
                moved = _fields(_text(f"/proc/self/task/{name}/io"))
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has just ended
            now[name] = read, written = int(moved["read_bytes"]), int(moved["write_bytes"])
            read_before, written_before = self._before.get(name, (0, 0))
            self._read += max(0, read - read_before)
            self._written += max(0, written - written_before)
        self._before = now
        return {"read_bytes": self._read, "written_bytes": self._written}


_moved = _Moved()


def _modes() -> Mapping[str, int]:
    torch: Any = sys.modules["torch"]
    profiler = sys.modules.get("torch.autograd.profiler")
    return {
        "anomaly": int(torch.is_anomaly_enabled()),
        "profiler": int(getattr(profiler, "_is_profiler_enabled", False)),
    }


def _fields(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _kib(text: str) -> int:
    return 1024 * int(text.split()[0])
