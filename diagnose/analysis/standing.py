"""Lines of the loop that wait, told by what they take and not by what they call.

Source text names some waits: `time.sleep`, `process.wait()`. It does not name a lock in a `with`, a lookup
that asks a server, a pool's `map`. But a thread that waits uses no CPU, and the sampler reads how much.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from diagnose.core.host import HostStats
from diagnose.core.phases import Phase
from diagnose.core.profile import SourceLine
from diagnose.source.idioms import is_training
from diagnose.source.purposes import PYTHON_LOOP, WAIT
from diagnose.source.tensor_values import TENSOR_PACKAGES
from diagnose.store.reader import Frame, RankLog

STANDS = 0.8
"""Part of a line's time without a CPU from which on it waits. What computes has one for more than half of
its time even beside as many busy processes as there are CPUs."""

LEAST_SEEN_NS = 20_000_000
"""So long a line must have been seen to stand, in all: what two samples tell may be chance. A parallel
operation stood off the CPU for 79 % of 5 ms."""

MAX_RUNNABLE = 0.2
"""Where the thread stands in line for a CPU for more of its time, a line without one need not wait for
anything else."""

LEAST_OF_ITS_OWN = 0.5
"""Part of a line's time that it waits at least besides what it can have waited for the interpreter lock: no
longer than other Python threads of the process computed."""

LEAST_OF_A_BATCH = 0.1
"""Part of the step that a line which makes a batch takes at least. Operations that torch divides among
threads stand still there for each other's sake: on two CPUs such lines were told to wait for 3 to 6 % of
healthy steps."""

MAX_READ_BYTES_PER_S = 1e6
"""Bytes from the disk at most: else a line that makes a batch waits for those."""


def with_waits(lines: Iterable[SourceLine], log: RankLog, host: HostStats) -> list[SourceLine]:
    """Returns the lines with their part without a CPU; those that mostly wait, and of which the source does
    not say what for, have the idiom of a wait.

    Args:
        lines: Of the training thread.
        log: Its rank's records.
        host: What the operating system said meanwhile. Where it says nothing no line waits by this.
    """
    off_cpu = _off_cpu(log)
    known = [replace(each, off_cpu=off_cpu.get((each.file, each.line, each.function))) for each in lines]
    # A device makes lines wait by itself: for what was asked of it.
    if log.meta.get("device", "cpu") != "cpu" or host.runnable_share is None:
        return known
    if host.runnable_share > MAX_RUNNABLE:
        return known
    held = sum(thread.cpus for thread in host.python_threads)
    reads = host.read_bytes_per_s is None or host.read_bytes_per_s > MAX_READ_BYTES_PER_S
    phases = (Phase.OTHER,) if reads else (Phase.OTHER, Phase.DATA_WAIT)
    return [
        replace(line, idiom=(WAIT,)) if line.phase in phases and _waits(line, held) else line
        for line in known
    ]


def _waits(line: SourceLine, held: float) -> bool:
    """Whether a line of the loop's own stands still, and its source says nothing of what it is for.

    Args:
        line: It.
        held: CPUs that other Python threads of the process use.
    """
    of_tensors = not line.via or TENSOR_PACKAGES.match(line.via) is not None
    if line.phase is Phase.DATA_WAIT and line.share < LEAST_OF_A_BATCH and of_tensors:
        return False
    own = line.between > line.share / 2 and not line.trains and not is_training(line.via)
    off_cpu = line.off_cpu or 0.0
    unlocked = line.share * off_cpu - held
    return (
        own
        and not set(line.idiom) - {PYTHON_LOOP}
        and off_cpu >= STANDS
        and unlocked >= LEAST_OF_ITS_OWN * line.share
    )


def _off_cpu(log: RankLog) -> dict[Frame, float]:
    """Returns by line the part of its time in which the training thread used no CPU."""
    passed: dict[Frame, int] = defaultdict(int)
    off: dict[Frame, int] = defaultdict(int)
    for (_, *stack), passed_ns, off_ns in log.standing:
        if stack:
            passed[stack[0]] += passed_ns
            off[stack[0]] += off_ns
    return {line: off[line] / ns for line, ns in passed.items() if ns >= LEAST_SEEN_NS}
