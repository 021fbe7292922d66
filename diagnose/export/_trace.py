"""What of a run is drawn on a time line, read from the store: bounded, however long the run is."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.device_ledger import by_device_clock
from diagnose.analysis.gaps import phase_weights, split_gaps
from diagnose.analysis.tuning import KINDS
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.parallel import ClockOffset
from diagnose.core.phases import Phase
from diagnose.export._follower import SCRIPT_EVENTS, UNREADABLE, rank_name, unix_minus_clock_ns
from diagnose.export._reading import clean, finite
from diagnose.source.roles import Roles
from diagnose.source.sources import Sources
from diagnose.store.reader import read_rank
from diagnose.store.runs import rank_files
from diagnose.store.tail import Event, Look, look

MAX_STEPS = 20_000
"""Newest steps drawn one by one, of all ranks together: with six phases each some 15 MB of JSON."""

MAX_BINS = 500
"""Slices for the steps of a rank before those."""

MAX_EVENTS = 5000
"""Newest events of a rank: a script may collect garbage in every step."""

EVENTS_AT_A_TIME = 10_000
VITALS = 300

SAMPLES = COLUMNS.index("samples")

Unix = Callable[[int], int]
"""Gives nanoseconds since 1970 for a time of a rank's own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Some steps that follow each other, mostly one.

    Attributes:
        begin_ns: When the first began, in nanoseconds since 1970.
        time_ns: What they took, all together.
        phase_ns: Likewise by phase, without those that took none, in the order of phases.
    """

    first: int
    num_steps: int
    begin_ns: int
    time_ns: int
    phase_ns: Mapping[Phase, float]
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """An event at one instant: of the script's, or the tuner's."""

    time_ns: int
    step: int
    label: str
    is_scripts: bool
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's time line.

    Attributes:
        segments: In order; at least one.
        memory: Time and resident bytes.
    """

    name: str
    host: str
    segments: tuple[Segment, ...]
    events: tuple[Happened, ...]
    memory: tuple[tuple[int, int], ...]


def read_time_lines(
    folder: Path, max_ranks: int, warmup: int, clocks: Mapping[str, ClockOffset | None]
) -> list[RankTrace]:
    """Reads the time lines of a run's first ranks; one without steps, or unreadable, is left out.

    Args:
        folder: The run's folder.
        max_ranks: So many ranks at most.
        warmup: Leading steps whose sampled lines are left out.
        clocks: By a rank's name, how far its clock is ahead of the first rank's; without it, its machine's
            word on the time of day is taken.
    """
    paths = rank_files(folder)[:max_ranks]
    sources = Sources()
    each = MAX_STEPS // max(1, len(paths))
    first_ns = _first_anchor_ns(paths)
    traces = (
        _rank_trace(path, warmup, sources, each, clocks.get(rank_name(path)), first_ns) for path in paths
    )
    return [trace for trace in traces if trace is not None]


def _first_anchor_ns(paths: Sequence[Path]) -> int:
    """Returns what to add to the first rank's times: the first that has steps."""
    for path in paths:
        with contextlib.suppress(*UNREADABLE), look(path) as file:
            if file.num_steps():
                return unix_minus_clock_ns(file.meta())
    return 0


def _rank_trace(
    path: Path, warmup: int, sources: Sources, max_steps: int, clock: ClockOffset | None, first_ns: int
) -> RankTrace | None:
    try:
        log = read_rank(path)
        sources.know(log.sources)
        weights = phase_weights(split_gaps(log, warmup, Roles(log.sites, sources, log.samples)))
        own_ns = unix_minus_clock_ns(log.meta)

        def unix(time_ns: int) -> int:
            return time_ns + own_ns if clock is None else clock.removed(time_ns) + first_ns

        with look(path) as file:
            events = _events(file, unix)
            memory = tuple(
                (unix(time_ns), readings["resident_bytes"])
                for time_ns, _, readings in file.spread_vitals(VITALS)
                if isinstance(readings.get("resident_bytes"), int)
            )
    except UNREADABLE:
        return None
    pace = 1.0 if clock is None else 1.0 - clock.drift
    segments = _segments(by_device_clock(log).steps, weights, unix, pace, max_steps)
    if not segments:
        return None
    return RankTrace(
        name=rank_name(path),
        host=str(log.meta.get("host", "")),
        segments=segments,
        events=events,
        memory=memory,
    )


def _segments(
    steps: npt.NDArray[np.int64], weights: npt.NDArray[np.float64], unix: Unix, pace: float, max_steps: int
) -> tuple[Segment, ...]:
    """Makes slices of steps; `pace` is what a nanosecond of the rank's clock is by that of the drawing."""
    newest = max(0, len(steps) - max_steps)
    width = -(-newest // MAX_BINS) or 1
    firsts = np.concatenate([np.arange(0, newest, width), np.arange(newest, len(steps))])
    if not len(firsts):
        return ()
    sums = np.add.reduceat(steps, firsts, axis=0)
    slots = sums[:, len(COUNTS) :]
    times = slots.sum(axis=1)
    phases = pace * (slots @ weights)
    lasts = np.append(firsts[1:], len(steps)) - 1
    order = tuple(Phase)
    # A step begins where the one before ended, unless the recorder paused: hence from its own end.
    begins = (steps[lasts, 0] - times).tolist()
    for index in range(1, len(begins)):
        begins[index] = max(begins[index], begins[index - 1] + int(times[index - 1]))
    return tuple(
        Segment(
            first=int(first),
            num_steps=int(last - first) + 1,
            begin_ns=unix(begin_ns),
            time_ns=int(pace * time_ns),
            phase_ns={order[index]: float(own[index]) for index in np.flatnonzero(own > 0)},
            samples=int(samples),
        )
        for first, last, begin_ns, time_ns, own, samples in zip(
            firsts, lasts, begins, times, phases, sums[:, SAMPLES], strict=True
        )
    )


def _events(file: Look, unix: Unix) -> tuple[Happened, ...]:
    kinds = (*SCRIPT_EVENTS, *KINDS)
    newest: deque[Event] = deque(maxlen=MAX_EVENTS)
    after = 0
    while events := file.events_after(after, kinds, EVENTS_AT_A_TIME):
        after = events[-1].number
        newest.extend(events)
    return tuple(_happened(event, unix) for event in newest)


def _happened(event: Event, unix: Unix) -> Happened:
    detail = event.detail
    said = [str(detail[key]) for key in ("action", "command", "state", "outcome") if detail.get(key)]
    return Happened(
        time_ns=unix(event.time_ns),
        step=event.step,
        label=": ".join([event.kind.replace("_", " "), " ".join(said)] if said else [event.kind]),
        is_scripts=event.kind in SCRIPT_EVENTS,
        detail={key: _plain(value) for key, value in detail.items() if key != "step"},
    )


def _plain(value: Any) -> Any:
    """Returns a value that JSON and the viewer both take: text, a number, or else text of it."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return finite(value)
    return clean(value if isinstance(value, str) else str(value))
