"""A trace file for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diagnose import __version__
from diagnose.export._files import FileExporter, packed, replace
from diagnose.export._reading import Reading, clean

if TYPE_CHECKING:
    from diagnose.export._trace import RankTrace

MAX_RANKS = 64
"""Ranks drawn, the first ones. More tracks nobody reads, and the file would not open."""

STEPS_TRACK, PHASES_TRACK, EVENTS_TRACK, FINDINGS_TRACK = 1, 2, 3, 4
TRACKS = {
    STEPS_TRACK: "steps",
    PHASES_TRACK: "phases (one bar each per step, in the order of phases)",
    EVENTS_TRACK: "gc, checkpoints, compilations",
    FINDINGS_TRACK: "tuning and findings",
}

ORDER_NOTE = (
    "A step's phases are sums: each phase is drawn once per step, one after the other in a fixed order, "
    "although it may have come in several pieces."
)

US = 1000
"""Nanoseconds in the unit of the format."""


class Perfetto(FileExporter):
    """Writes the Chrome Trace Event format: steps and phases of each rank as slices, what happened as
    instants, samples per second and memory as counters.

    The newest steps one by one, those before them many to a slice, so that a run of any length makes a file
    that a browser can open. Compressed where the name ends in `.gz`.
    """

    ending = ".trace.json.gz"
    live = False

    def write(self, path: Path, reading: Reading) -> str:
        data = json.dumps(trace_of(reading), allow_nan=False, separators=(",", ":")).encode()
        replace(path, packed(path, data), "perfetto")
        return f"wrote {path}: open it in https://ui.perfetto.dev (nothing is uploaded there)"


def trace_of(reading: Reading) -> dict[str, Any]:
    """Returns a run as the object form of the Chrome Trace Event format."""
    from diagnose.export._trace import read_time_lines

    profile = reading.profile
    # On the first rank's own host all have one clock.
    away = [rank for rank in profile.ranks if rank.host != profile.ranks[0].host]
    clocks = {str(rank.rank): rank.clock for rank in away}
    ranks = read_time_lines(reading.folder, MAX_RANKS, profile.steps.warmup, clocks)
    begun_ns = min((rank.segments[0].begin_ns for rank in ranks), default=0)
    events: list[dict[str, Any]] = []
    for number, rank in enumerate(ranks):
        # Process 0 is the kernel's own to Perfetto.
        events += _rank_events(rank, number + 1, begun_ns)
    events += _findings(reading, ranks, begun_ns)
    run = profile.run
    left_out = len(reading.ranks) - len(ranks)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "writer": f"diagnose {__version__}",
            "run": clean(run.id),
            "script": clean(run.script),
            "started": run.started,
            "note": ORDER_NOTE + (f" {left_out} further ranks are left out." if left_out > 0 else ""),
        },
    }


def _rank_events(rank: RankTrace, pid: int, begun_ns: int) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", pid, 0, f"rank {rank.name}" + (f" on {rank.host}" if rank.host else ""))
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for tid, name in TRACKS.items():
        if tid != FINDINGS_TRACK or pid == 1:
            yield _metadata("thread_name", pid, tid, name)
    for segment in rank.segments:
        at_us = (segment.begin_ns - begun_ns) / US
        one = segment.num_steps == 1
        last = segment.first + segment.num_steps - 1
        args: dict[str, Any] = (
            {"step": segment.first} if one else {"first_step": segment.first, "last": last}
        )
        if segment.samples:
            args["samples"] = segment.samples
        name = f"step {segment.first}" if one else f"steps {segment.first} to {last}"
        yield _slice(name, pid, STEPS_TRACK, at_us, segment.time_ns / US, args)
        # In whole nanoseconds: a slice that reaches into the next one is dropped by Perfetto.
        begin_ns, spent_ns, end_ns = segment.begin_ns - begun_ns, 0.0, segment.time_ns
        for phase, time_ns in segment.phase_ns.items():
            before, spent_ns = round(spent_ns), spent_ns + time_ns
            lasts_ns = min(round(spent_ns), round(end_ns)) - before
            yield _slice(phase.label, pid, PHASES_TRACK, (begin_ns + before) / US, lasts_ns / US, {})
        if segment.samples and segment.time_ns:
            rate = {"samples/s": segment.samples * 1e9 / segment.time_ns}
            yield _counter("throughput", pid, (segment.begin_ns - begun_ns) / US, rate)
    for time_ns, num_bytes in rank.memory:
        yield _counter("resident memory", pid, max(0, time_ns - begun_ns) / US, {"bytes": num_bytes})
    for event in rank.events:
        tid = EVENTS_TRACK if event.is_scripts else FINDINGS_TRACK
        at_us = max(0, event.time_ns - begun_ns) / US
        yield _instant(clean(event.label), pid, tid, at_us, {"step": event.step, **event.detail})


def _findings(reading: Reading, ranks: list[RankTrace], begun_ns: int) -> Iterator[dict[str, Any]]:
    """Findings are of the whole run: they stand where the first rank's last step ends."""
    if not ranks:
        return
    last = ranks[0].segments[-1]
    at_us = (last.begin_ns + last.time_ns - begun_ns) / US
    for finding in reading.profile.findings:
        args = {
            "summary": clean(finding.summary),
            "lost_ms_per_step": finding.lost_ns_per_step / 1e6,
            "evidence": [clean(sentence) for sentence in finding.evidence],
            "fix": clean(finding.fix),
            "place": clean(f"{finding.file}:{finding.line}") if finding.file else "",
        }
        yield _instant(f"finding: {clean(finding.rule)}", 1, FINDINGS_TRACK, at_us, args)


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": clean(name)}}


def _slice(
    name: str, pid: int, tid: int, at_us: float, time_us: float, args: dict[str, Any]
) -> dict[str, Any]:
    event = {"name": name, "ph": "X", "pid": pid, "tid": tid, "ts": _us(at_us), "dur": _us(time_us)}
    return {**event, "args": args} if args else event


def _counter(name: str, pid: int, at_us: float, values: dict[str, float]) -> dict[str, Any]:
    return {"name": name, "ph": "C", "pid": pid, "tid": 0, "ts": _us(at_us), "args": values}


def _instant(name: str, pid: int, tid: int, at_us: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": _us(at_us), "args": args}


def _us(value: float) -> float:
    return round(value, 3)  # nanoseconds
