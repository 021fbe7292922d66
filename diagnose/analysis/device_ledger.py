"""The steps by the device's clock, in place of the host's where there are any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COUNTS, DATA_WAIT, DEVICE_COLUMNS, GC, HOOKED, SLOTS
from diagnose.core.phases import Phase
from diagnose.store.reader import RankLog

MIN_COVERAGE = 0.5
"""With fewer steps by the device's clock than by the host's the ledger stays the host's: a mean of the two
would be neither's."""

CERTAIN = 0.02
"""Of the step: where what was idle for certain and what was so at most are no further apart, the idleness
is known."""

LAUNCH_NOTHING = [DATA_WAIT, GC]
"""Slots in which the device gets no work of the training thread's."""

BY_DEVICE = "by_device_clock"
"""In the metadata of a log whose steps are the device's."""

HOLES = DEVICE_COLUMNS.index("holes")
TIMES = DEVICE_COLUMNS.index(SLOTS[0])
DRY = DEVICE_COLUMNS.index(f"dry_{SLOTS[0]}")


def by_device_clock(log: RankLog) -> RankLog:
    """Returns a rank's records with the slots of each step as the device saw them.

    A step that the device's clock does not cover keeps the host's, and so do all where it covers too few. A
    step is then as long as the device took from the end of the one before to its end.
    """
    covered = _covered(log)
    if not covered.any() or covered.mean() < MIN_COVERAGE:
        return log
    steps = log.steps.copy()
    steps[covered, len(COUNTS) :] = log.device_steps[covered, TIMES : TIMES + len(SLOTS)]
    return replace(log, steps=steps, meta={**log.meta, BY_DEVICE: True})


def device_share(log: RankLog, warmup: int) -> float | None:
    """Returns the part of the measured steps that are by the device's clock; `None` where all are the
    host's because there is no device, or its clock was heard too rarely."""
    covered = _covered(log)[warmup:]
    return float(covered.mean()) if log.meta.get(BY_DEVICE) and len(covered) else None


def idle_ns(log: RankLog, warmup: int) -> dict[Phase, float] | None:
    """Returns nanoseconds per step in which the device had nothing to do, by what the host did meanwhile.

    From events alone this is certain where nothing is launched; where something is, they give a bound.
    `None` unless the two come close: then only a trace can tell.
    """
    heard = _heard(log, warmup)
    if heard is None:
        return None
    times, dry = (slots.mean(axis=0) for slots in heard)
    unsure = dry.sum() - dry[LAUNCH_NOTHING].sum()
    if unsure > CERTAIN * times.sum():
        return None
    return {phase: float(dry[slot]) for slot, phase in enumerate(HOOKED)}


def idle_at_most(log: RankLog, warmup: int) -> npt.NDArray[np.int64] | None:
    """Returns of each measured step that the device's clock covers the time in which the device may have
    had nothing to do, at most, by what the host did meanwhile.

    Rows of `core.ledger.COLUMNS`, whose counts are 0; `None` where that clock was not heard.
    """
    heard = _heard(log, warmup)
    if heard is None:
        return None
    dry = heard[1]
    return np.hstack([np.zeros((len(dry), len(COUNTS)), dtype=dry.dtype), dry])


def recording_ns(log: RankLog) -> float:
    """Returns what recording the events cost the training thread over the run."""
    facts: dict[str, Any] = (log.meta.get("facts") or {}).get("device_clock") or {}
    events, new = float(facts.get("events", 0)), float(facts.get("new_events", 0))
    return (events - new) * float(facts.get("event_ns", 0)) + new * float(facts.get("new_event_ns", 0))


def _heard(log: RankLog, warmup: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Returns nanoseconds of each measured step that the device's clock covers, by slot: in all, and those
    in which it may have had nothing to do; `None` without any."""
    if device_share(log, warmup) is None:
        return None
    rows = log.device_steps[warmup:][_covered(log)[warmup:]]
    if not len(rows):
        return None
    times = rows[:, TIMES : TIMES + len(SLOTS)]
    dry = rows[:, DRY : DRY + len(SLOTS)].copy()
    dry[:, LAUNCH_NOTHING] = times[:, LAUNCH_NOTHING]
    return times, dry


def _covered(log: RankLog) -> npt.NDArray[np.bool_]:
    if not len(log.device_steps):
        return np.zeros(len(log.steps), dtype=np.bool_)
    covered: npt.NDArray[np.bool_] = log.device_steps[:, HOLES] == 0
    return covered
