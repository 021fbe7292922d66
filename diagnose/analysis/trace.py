"""What a trace of torch's profiler says: kernels by class, idleness, waiting, exposed communication.

Everything is arithmetic of intervals on the columns of `trace_events`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from diagnose.analysis.intervals import NOTHING, Instants, both, holds, length_ns, union, without
from diagnose.analysis.trace_classes import (
    IN_OPTIMIZER,
    changes_layout,
    kernel_class,
    operation_class,
    uses_tensor_cores,
)
from diagnose.analysis.trace_events import CALL, COPY, FILL, KERNEL, NOTE, OPERATION, Events, read_events
from diagnose.core.deep_window import OURS, ClassTime, Hot, Sync, Trace, WorkClass

MAX_TOP = 40
"""Names listed; a step rarely spends a measurable part in more."""

MAX_SYNCS = 20

WAITS = re.compile(r"(cuda|hip|cu)(Stream|Device|Event|Ctx)Synchronize|(cuda|hip)Memcpy$|cuMemcpyDtoH")
"""Calls that return when the device has done something. `cudaMemcpy` without `Async` is one."""

WAITING_COPY = re.compile(r"Memcpy DtoH \(Device -> Pageable\)")
"""A copy that the driver makes while the call for it waits, whatever that is called: `cudaMemcpyAsync`."""

LAUNCHES = re.compile(r"(cuda|hip|cu)(Ext)?(Graph)?Launch\w*|hipModuleLaunchKernel|cudaLaunchKernelExC")
GRAPH_LAUNCHES = re.compile(r"(cuda|hip|cu)GraphLaunch")
TOLD_SHARE = 0.9
"""Of the kernels' time: what the others do could not change a mean by much."""

STEP_MARK = "ProfilerStep#"
OPTIMIZER_MARK = "Optimizer.step#"

Vector = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


def read_trace(path: Path, *, until_ns: int | None = None) -> Trace:
    """Reads and analyses a trace, `.json` or `.json.gz`.

    Args:
        path: The file.
        until_ns: Leave out what begins later, counted from the first event. Default: nothing.

    Raises:
        DiagnoseError: If it is no trace.
        OSError: If it cannot be read.
    """
    events = read_events(path)
    return summarize(events if until_ns is None else events.until(until_ns))


def summarize(events: Events) -> Trace:
    """Analyses the events of a trace."""
    if not len(events.start_ns):
        return Trace(device="", num_events=events.num_events, damaged=events.damaged)
    start, end = events.start_ns, events.end_ns
    kernel = events.kind == KERNEL
    moves = (events.kind == COPY) | (events.kind == FILL)
    call, note = events.kind == CALL, events.kind == NOTE
    on_device = bool(kernel.any())
    works = [kernel_class(name) for name in events.names]
    collective = kernel & _named(events, lambda index: works[index] is WorkClass.COLLECTIVE)
    computing = kernel & ~collective
    busy = _union(events, kernel | moves)
    compute = _union(events, computing)
    communication = _union(events, collective)
    waiting_copies = events.correlation[(events.kind == COPY) & _matching(events, WAITING_COPY)]
    waits = call & (
        _matching(events, WAITS) | (np.isin(events.correlation, waiting_copies) & (events.correlation >= 0))
    )
    asked = waits & ~_inside(events, _beginning(events, OURS))
    times = end - start
    tensor = _named(events, lambda index: uses_tensor_cores(events.names[index])) & kernel
    layout = _named(events, lambda index: changes_layout(events.names[index])) & kernel
    ran = kernel | moves
    classes, top = _kernels(events, ran, works) if on_device else _operations(events)
    launches = call & _matching(events, LAUNCHES)
    return Trace(
        device=events.device if on_device else "",
        num_steps=len({events.names[name] for name in events.name[note & _beginning(events, STEP_MARK)]}),
        num_events=events.num_events,
        damaged=events.damaged,
        span_ns=int(end.max() - start.min()),
        kernels_span_ns=int(end[ran].max() - start[ran].min()) if ran.any() else 0,
        num_kernels=int(kernel.sum()),
        num_launches=int(launches.sum()) if launches.any() else None,
        num_graph_launches=int((call & _matching(events, GRAPH_LAUNCHES)).sum()),
        launched_share=_launched_share(events, launches, ran) if on_device else None,
        busy_ns=length_ns(busy),
        compute_ns=length_ns(compute),
        communication_ns=length_ns(communication),
        exposed_ns=length_ns(without(communication, compute)),
        launch_bound_ns=_launch_bound_ns(events, busy, _union(events, waits)) if on_device else None,
        sync_ns=length_ns(_union(events, asked)),
        kernel_ns=int(times[kernel].sum()),
        tensor_core_ns=int(times[tensor].sum()),
        layout_ns=int(times[layout].sum()),
        sm_share=_sm_share(events.blocks_per_sm[computing], times[computing]),
        classes=classes,
        top=top,
        syncs=_syncs(events, asked),
    )


def _sm_share(blocks_per_sm: npt.NDArray[np.float64], times: npt.NDArray[np.int64]) -> float | None:
    """Returns the part of the multiprocessors in use while kernels ran, where nearly all kernels tell."""
    told = np.isfinite(blocks_per_sm)
    told_ns = times[told].sum()
    if not told_ns or told_ns < TOLD_SHARE * times.sum():
        return None
    return float((np.clip(blocks_per_sm[told], 0.0, 1.0) * times[told]).sum() / told_ns)


def _launched_share(events: Events, launches: Mask, ran: Mask) -> float | None:
    """Returns the part of the launches that something in the trace ran for; `None` where none has a number.

    A call of the runtime may hold one of the driver, either of which may have the kernel's number: the two
    are one launch.
    """
    places = np.flatnonzero(launches & (events.correlation >= 0))
    if not len(places):
        return None
    places = places[np.lexsort((-events.end_ns[places], events.start_ns[places], events.thread[places]))]
    start, end, thread = events.start_ns[places], events.end_ns[places], events.thread[places]
    outermost = np.append(True, (thread[1:] != thread[:-1]) | (start[1:] >= end[:-1]))
    found = np.isin(events.correlation[places], events.correlation[ran])
    return float(np.logical_or.reduceat(found, np.flatnonzero(outermost)).mean())


def _launch_bound_ns(events: Events, busy: Instants, waiting: Instants) -> int | None:
    """Returns the time in which the device was idle between its first kernel and its last, and the host in
    an operation or a call of the runtime that does not wait."""
    host = _union(events, (events.kind == OPERATION) | (events.kind == CALL))
    if not len(host) or not len(busy):
        return None
    whole = np.array([[busy[0, 0], busy[-1, 1]]])
    return length_ns(without(both(without(whole, busy), host), waiting))


def _kernels(
    events: Events, ran: Mask, works: list[WorkClass]
) -> tuple[tuple[ClassTime, ...], tuple[Hot, ...]]:
    """Returns kernels and copies by class and by name."""
    in_optimizer = _launched_inside(events, ran, OPTIMIZER_MARK)
    names, times = events.name[ran], (events.end_ns - events.start_ns)[ran]
    return _listed(events, names, times, in_optimizer[ran], works, uses_tensor_cores)


def _operations(events: Events) -> tuple[tuple[ClassTime, ...], tuple[Hot, ...]]:
    """Returns the operations of the CPU by class and by name, each without what ran inside it."""
    mask = events.kind == OPERATION
    if not mask.any():
        return (), ()
    inside = _inside(events, (events.kind == NOTE) & _beginning(events, OPTIMIZER_MARK))
    works = [operation_class(name) for name in events.names]
    return _listed(events, events.name[mask], own_ns(events, mask), inside[mask], works, lambda name: False)


def own_ns(events: Events, mask: Mask) -> Vector:
    """Returns the time of each operation in the mask, less that of operations inside it on its thread."""
    start, end, thread = events.start_ns[mask], events.end_ns[mask], events.thread[mask]
    order = np.lexsort((-end, start, thread))
    own = [0] * len(order)
    stack: list[tuple[int, int]] = []  # end and place of each open operation
    current = -1
    columns = zip(
        order.tolist(), thread[order].tolist(), start[order].tolist(), end[order].tolist(), strict=True
    )
    for place, on, begun, ended in columns:
        if on != current:
            stack.clear()
            current = on
        while stack and stack[-1][0] <= begun:
            stack.pop()
        own[place] = ended - begun
        if stack:
            own[stack[-1][1]] -= min(ended, stack[-1][0]) - begun
        stack.append((ended, place))
    return np.array(own, dtype=np.int64)


def _listed(
    events: Events,
    names: Vector,
    times: Vector,
    in_optimizer: Mask,
    works: list[WorkClass],
    tensor_core: Callable[[str], bool],
) -> tuple[tuple[ClassTime, ...], tuple[Hot, ...]]:
    keys, places = np.unique(names * 2 + in_optimizer, return_inverse=True)
    counts = np.bincount(places, minlength=len(keys))
    sums = np.zeros(len(keys), dtype=np.int64)
    np.add.at(sums, places, times)
    classes: dict[WorkClass, list[int]] = defaultdict(lambda: [0, 0])
    hot: list[Hot] = []
    for key, count, spent in zip(keys.tolist(), counts.tolist(), sums.tolist(), strict=True):
        name, work = events.names[key // 2], works[key // 2]
        if key % 2 and work in IN_OPTIMIZER:
            work = WorkClass.OPTIMIZER
        classes[work][0] += count
        classes[work][1] += spent
        hot.append(Hot(name=name, work=work, count=count, total_ns=spent, tensor_core=tensor_core(name)))
    by_class = [ClassTime(work=work, count=n, total_ns=spent) for work, (n, spent) in classes.items()]
    return (
        tuple(sorted(by_class, key=lambda each: -each.total_ns)),
        tuple(sorted(hot, key=lambda each: (-each.total_ns, each.name))[:MAX_TOP]),
    )


def _launched_inside(events: Events, ran: Mask, mark: str) -> Mask:
    """Returns which kernels were launched by a call inside an annotation that begins with `mark`."""
    numbered = events.correlation >= 0
    held = _inside(events, (events.kind == NOTE) & _beginning(events, mark))
    calls = events.correlation[(events.kind == CALL) & numbered & held]
    found: Mask = ran & numbered & np.isin(events.correlation, calls)
    return found


def _inside(events: Events, marks: Mask) -> Mask:
    """Returns which events begin inside one of the marked ones on their thread, those themselves too."""
    inside = np.zeros(len(marks), dtype=bool)
    for thread in np.unique(events.thread[marks]):
        there = events.thread == thread
        inside |= there & holds(_union(events, marks & there), events.start_ns)
    return inside


def _syncs(events: Events, waits: Mask) -> tuple[Sync, ...]:
    """Returns the calls that wait, by the operation they are in."""
    if not waits.any():
        return ()
    inside = _innermost(events, waits)
    grouped: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    spent = events.end_ns - events.start_ns
    for place, operation in zip(np.flatnonzero(waits).tolist(), inside, strict=True):
        key = (int(events.name[place]), operation)
        grouped[key][0] += 1
        grouped[key][1] += int(spent[place])
    found = [
        Sync(
            what=events.names[call] + (f" in {events.names[operation]}" if operation >= 0 else ""),
            count=count,
            blocked_ns=blocked,
        )
        for (call, operation), (count, blocked) in grouped.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.blocked_ns)[:MAX_SYNCS])


def _innermost(events: Events, calls: Mask) -> list[int]:
    """Returns the name of the innermost operation around each call, on its thread; -1 outside of any."""
    names = np.full(int(calls.sum()), -1)
    for thread in np.unique(events.thread[calls]):
        there = np.flatnonzero((events.kind == OPERATION) & (events.thread == thread))
        mine = np.flatnonzero(events.thread[calls] == thread)
        order = there[np.lexsort((-events.end_ns[there], events.start_ns[there]))]
        stack: list[int] = []
        at = 0
        places = np.flatnonzero(calls)[mine]
        for index in np.argsort(events.start_ns[places], kind="stable"):
            begun = events.start_ns[places[index]]
            while at < len(order) and events.start_ns[order[at]] <= begun:
                while stack and events.end_ns[stack[-1]] <= events.start_ns[order[at]]:
                    stack.pop()
                stack.append(int(order[at]))
                at += 1
            while stack and events.end_ns[stack[-1]] <= begun:
                stack.pop()
            if stack:
                names[mine[index]] = events.name[stack[-1]]
    return [int(name) for name in names]


def _union(events: Events, mask: Mask) -> Instants:
    return union(events.start_ns[mask], events.end_ns[mask]) if mask.any() else NOTHING


def _named(events: Events, true_of: Callable[[int], bool]) -> Mask:
    """Returns which events have a name that something is true of, asked once for each name."""
    answers = np.array([true_of(index) for index in range(len(events.names))], dtype=bool)
    found: Mask = answers[events.name]
    return found


def _matching(events: Events, pattern: re.Pattern[str]) -> Mask:
    return _named(events, lambda index: pattern.match(events.names[index]) is not None)


def _beginning(events: Events, mark: str) -> Mask:
    return _named(events, lambda index: events.names[index].startswith(mark))
