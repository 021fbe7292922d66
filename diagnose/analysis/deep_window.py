"""The deep window of a run: which steps it spoilt, what it recorded, and what that says of the device."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diagnose.analysis.spans import moved_meta
from diagnose.analysis.trace import read_trace
from diagnose.core.deep_window import (
    KIND,
    ClassTime,
    Counted,
    DeepWindow,
    Hot,
    Sync,
    Trace,
    Work,
    WorkClass,
)
from diagnose.core.errors import DiagnoseError
from diagnose.store.machine import read_rates
from diagnose.store.reader import RankLog

TO_THE_END = 1 << 60
"""The last step of a window that the process did not live to end."""

SUMMARY = 3
"""Version of the summary that is kept beside a trace, so that it is read once. Another is made again."""

Spoilt = tuple[tuple[int, int], ...]
"""First and last step of each stretch, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """A window whose files are there.

    Attributes:
        spoilt: First and last step that it slowed down; `None` in files that do not say so, which older
            versions wrote.
    """

    window: DeepWindow
    spoilt: tuple[int, int] | None


def _kept(log: RankLog) -> list[_Kept]:
    """Returns the windows that a rank's process has put down, the earliest first.

    A window is there as soon as its file is: a process that is killed then has no time to record its end.
    """
    ended = any(kind == KIND and detail.get("state") == "ended" for _, _, kind, detail in log.events)
    found: list[_Kept] = []
    for path in log.path.parent.glob(f"deep-rank{int(log.meta.get('rank', 0))}-step*.window.json"):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            told = json.loads(path.read_text(encoding="utf-8"))
            pid, spoilt = told.pop("pid", None), told.pop("spoilt", None)
            if ended if spoilt is None else pid == log.meta.get("pid"):
                steps = None if spoilt is None else (int(spoilt[0]), int(spoilt[1]))
                found.append(_Kept(window=_window(told), spoilt=steps))
    return sorted(found, key=lambda kept: kept.window.first_step)


def spoilt_steps(log: RankLog) -> Spoilt:
    """Returns the steps that deep windows slowed down, from their events and their files."""
    stretches: list[tuple[int, int]] = []
    for _, _, kind, detail in log.events:
        if kind != KIND:
            continue
        if detail.get("state") == "begun":
            stretches.append((int(detail.get("first", 0)), TO_THE_END))
        elif detail.get("state") in ("ended", "undone") and stretches:
            stretches[-1] = (stretches[-1][0], int(detail.get("last", 0)))
    ends = dict(stretches)
    for kept in _kept(log):
        if kept.spoilt is not None and ends.get(kept.spoilt[0], TO_THE_END) == TO_THE_END:
            ends[kept.spoilt[0]] = kept.spoilt[1]
    return tuple(sorted(ends.items()))


def untold_window(log: RankLog, *, is_over: bool) -> list[str]:
    """Returns, as a note or none, what became of a rank's last deep window if it told nothing.

    Args:
        log: The rank's records.
        is_over: Whether the run has ended.
    """
    told: list[dict[str, Any]] = [detail for _, _, kind, detail in log.events if kind == KIND]
    last = told[-1] if told else {}
    if last.get("state") in ("refused", "undone"):
        return [f"There is no deep window: {last.get('reason')}."]
    written = {kept.spoilt[0] for kept in _kept(log) if kept.spoilt is not None}
    if last.get("state") == "begun" and is_over and last.get("first") not in written:
        return [
            f"The run ended in the deep window that began at step {int(last.get('first', 0)):,}; "
            "steps since then are in no figure."
        ]
    return []


def without_steps(log: RankLog, spoilt: Spoilt, first: int = 0) -> RankLog:
    """Returns a rank's records as if some steps had not been.

    Running totals stay whole, as in `spans.part_of`.

    Args:
        log: The records, or a part of them.
        spoilt: Stretches of steps, counted from the run's first.
        first: The step, likewise, that `log` begins with.
    """
    gone = np.zeros(len(log.steps), dtype=bool)
    for begin, end in spoilt:
        gone[max(0, begin - first) : max(0, min(end, TO_THE_END - 1) - first + 1)] = True
    if not gone.any():
        return log
    before = np.concatenate(([0], np.cumsum(gone)))

    def stays(step: int) -> bool:
        return not (0 <= step < len(gone) and gone[step])

    def moved(step: int) -> int:
        return step - int(before[min(max(step, 0), len(gone))])

    return replace(
        log,
        meta=moved_meta(log, lambda step: moved(step) if stays(step) else None),
        steps=log.steps[~gone],
        device_steps=log.device_steps[~gone[: len(log.device_steps)]],
        samples=[
            (moved(step), slot, stack, weight) for step, slot, stack, weight in log.samples if stays(step)
        ],
        events=[(time, moved(step), kind, detail) for time, step, kind, detail in log.events],
        vitals=[(time, moved(step), totals) for time, step, totals in log.vitals if stays(step)],
    )


def deep_window_of(log: RankLog) -> DeepWindow | None:
    """Returns the newest deep window that a rank has finished; `None` without any.

    A trace that nobody has read yet is read now, and what it says kept beside it.
    """
    found = _kept(log)
    if not found:
        return None
    newest = found[-1].window
    counted = newest.counted
    trace = _told(log, _trace(log.path.parent / newest.trace_file, newest.wall_ns))
    uncounted = _uncounted(trace, counted) if counted is not None else ""
    name = _settings(log).get("name") or log.meta.get("device_name") or "cpu"
    return replace(
        newest,
        # The run may have ended meanwhile.
        left_out=min(newest.left_out, len(log.steps) + 1 - newest.first_step),
        trace=_with_lines(trace, counted),
        rates=read_rates(str(name), counted.dtype if counted else ""),
        counted=replace(counted, work=()) if counted is not None and uncounted else counted,
        why_not_counted=newest.why_not_counted or uncounted,
    )


def _told(log: RankLog, trace: Trace) -> Trace:
    """Returns what a trace says of the job: nothing where a model is on a device and no kernel was
    recorded, as what the host did meanwhile is no measure of that."""
    on_device = (log.meta.get("facts") or {}).get("accelerator")
    if not on_device or trace.on_device or not trace.num_events:
        return trace
    return replace(trace, launched_share=0.0, classes=(), top=())


def _uncounted(trace: Trace, counted: Counted) -> str:
    """Says why what was counted is not all that the step asked for; empty where it is."""
    if counted.unknown:
        return f"the steps call {counted.unknown}, whose products cannot be counted"
    if trace.num_graph_launches:
        return "the steps launch graphs, and what is inside one cannot be counted as it is called"
    ran = trace.on_device and any(each.work is WorkClass.ATTENTION for each in trace.classes)
    products = [each.flops for each in counted.work if each.work is WorkClass.ATTENTION]
    if (ran or products) and not sum(products):
        return "the steps have attention of a kind whose products cannot be counted"
    return ""


def _settings(log: RankLog) -> Mapping[str, Any]:
    return (log.meta.get("facts") or {}).get("device") or {}


def device_readings(window: DeepWindow | None) -> dict[str, Any]:
    """Returns what a window says of the fields of `core.device.Device`: nothing where it saw no kernel.

    Kernels take as long as ever while they are recorded, but the host does not: a share of the time is of
    a usual step where one is known, and idleness no more than such a step leaves.
    """
    if window is None or not window.trace.on_device or not window.num_steps:
        return {}
    trace = window.trace
    times = {each.work: each.total_ns for each in trace.classes}
    products = times.get(WorkClass.MATRIX, 0) + times.get(WorkClass.ATTENTION, 0)
    step_ns = window.step_ns or trace.span_ns / window.num_steps
    busy_ns = trace.busy_ns / window.num_steps
    idle_ns = None
    if trace.launch_bound_ns is not None and trace.is_whole:
        idle_ns = min(trace.launch_bound_ns / window.num_steps, max(0.0, step_ns - busy_ns))
    return {
        "busy_share": min(1.0, busy_ns / step_ns) if step_ns and trace.is_whole else None,
        "launch_bound_ns": idle_ns,
        "num_kernels": trace.num_kernels / window.num_steps if trace.is_whole else None,
        "tensor_core_share": trace.tensor_core_ns / trace.kernel_ns if trace.kernel_ns else None,
        "matmul_share": min(1.0, products / trace.busy_ns) if trace.busy_ns else None,
        "sm_share": trace.sm_share,
        "layout_share": min(1.0, trace.layout_ns / trace.busy_ns) if trace.busy_ns else None,
    }


def _with_lines(trace: Trace, counted: Counted | None) -> Trace:
    """Names the line of a wait that only one line makes: the trace has none, the counted step has."""
    lines: dict[str, list[Sync]] = {}
    for each in counted.lines if counted else ():
        lines.setdefault(each.what, []).append(each)

    def named(sync: Sync) -> Sync:
        own = lines.get(sync.what.rpartition(" in ")[2], [])
        return replace(sync, file=own[0].file, line=own[0].line) if len(own) == 1 else sync

    return replace(trace, syncs=tuple(map(named, trace.syncs)))


def _trace(path: Path, wall_ns: int) -> Trace:
    """Returns what a trace says, from its summary if there is one."""
    if not path.is_file():
        return Trace()
    summary = path.with_name(path.name.removesuffix(".trace.json.gz") + ".summary.json")
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(summary.read_text(encoding="utf-8"))
        if kept.pop("version") == SUMMARY and kept.pop("bytes") == path.stat().st_size:
            return _parsed(kept)
    try:
        trace = read_trace(path, until_ns=wall_ns or None)
    except (DiagnoseError, OSError):
        return Trace(damaged=True)
    with contextlib.suppress(OSError):
        beside = summary.with_name(f".{summary.name}.{os.getpid()}")
        told = {"version": SUMMARY, "bytes": path.stat().st_size, **asdict(trace)}
        beside.write_text(json.dumps(told), encoding="utf-8")
        beside.replace(summary)
    return trace


def _parsed(kept: Mapping[str, Any]) -> Trace:
    return Trace(
        **{
            **kept,
            "classes": tuple(
                ClassTime(**{**each, "work": WorkClass(each["work"])}) for each in kept["classes"]
            ),
            "top": tuple(Hot(**{**each, "work": WorkClass(each["work"])}) for each in kept["top"]),
            "syncs": _syncs(kept["syncs"]),
        }
    )


def _window(told: Mapping[str, Any]) -> DeepWindow:
    """Raises:
    TypeError, KeyError, ValueError: If it was not written by us.
    """
    counted = told.pop("counted") if isinstance(told, dict) else None
    return DeepWindow(
        **told,
        counted=None
        if counted is None
        else Counted(
            work=tuple(Work(**{**each, "work": WorkClass(each["work"])}) for each in counted["work"]),
            dtype=str(counted["dtype"]),
            lines=_syncs(counted["lines"]),
            unknown=str(counted.get("unknown", "")),  # files of older versions have none
        ),
    )


def _syncs(kept: Iterable[Mapping[str, Any]]) -> tuple[Sync, ...]:
    return tuple(Sync(**each) for each in kept)
