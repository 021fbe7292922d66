"""Processes that run at the same time and never together: each for a moment, the others stopped."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence

from diagnose.core.freed_memory import as_variables
from diagnose.store.runs import Stops

TURN_S = 0.3
"""A turn. A neighbour's burst or a lower clock lasts longer, and so meets all of them."""

TURN_STEPS = 10
"""A turn has so many steps at least: the one in which it ends is of no use."""

ENDS_ALL = 'while read -r group; do groups="$groups -$group"; done; kill -s KILL -- $groups 2>/dev/null'
"""A shell's program that reads groups of processes, and ends them when whoever writes is gone: a process
that is stopped does not hear of it, and would stay for ever."""

KEEPS_FREED = as_variables()
"""Lets the C library keep what is freed. Else it is chance, in each process anew, how much of it goes back
to the system in each step and is fetched again, and turns win little (`benchmarks/gate_turns.py`)."""


def take_turns(
    processes: Sequence[subprocess.Popen[bytes]], turn_s: float = TURN_S, timeout_s: float = math.inf
) -> list[Stops]:
    """Lets processes run in turn, the first one first, until all have ended; each leads a group of its own.

    Args:
        processes: They run when this begins.
        turn_s: How long each runs while others wait.
        timeout_s: When to give up, all together; infinite for never.

    Returns:
        When each was stopped.

    Raises:
        subprocess.TimeoutExpired: If they do not end in time. All of them go on then.
    """
    last = time.monotonic() + timeout_s
    away: list[list[tuple[int, int]]] = [[] for _ in processes]
    stopped_ns: dict[int, int] = {}

    def stop(place: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[place].pid, signal.SIGSTOP)
        stopped_ns[place] = time.perf_counter_ns()

    def go_on(place: int) -> None:
        if place in stopped_ns:
            away[place].append((stopped_ns.pop(place), time.perf_counter_ns()))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(processes[place].pid, signal.SIGCONT)

    with _outlived_by_none(processes):
        try:
            for place in range(1, len(processes)):
                stop(place)
            going = list(range(len(processes)))
            while going:
                for place in tuple(going):
                    go_on(place)
                    left_s = last - time.monotonic()
                    alone_s = turn_s if len(going) > 1 else math.inf
                    wait_s = min(alone_s, left_s)
                    try:
                        processes[place].wait(None if math.isinf(wait_s) else max(0.0, wait_s))
                        going.remove(place)
                    except subprocess.TimeoutExpired:
                        if left_s <= alone_s:
                            raise
                        stop(place)
        finally:
            for place in tuple(stopped_ns):
                go_on(place)
    return [*away]


@contextlib.contextmanager
def _outlived_by_none(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Has the processes ended when we are, however that comes about."""
    shell = subprocess.Popen(
        ["sh", "-c", ENDS_ALL],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert shell.stdin is not None
    try:
        for process in processes:
            shell.stdin.write(f"{process.pid}\n".encode())
        shell.stdin.flush()
        yield
    finally:
        shell.kill()
        shell.communicate()


def stopped_ns(stops: Stops, until_ns: int, *, since_ns: int = 0) -> int:
    """Returns for how many nanoseconds a process was stopped until a moment, or between two."""
    return sum(max(0, min(go_on, until_ns) - max(stop, since_ns)) for stop, go_on in stops)
