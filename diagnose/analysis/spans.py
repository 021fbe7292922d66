"""A part of a run, as if it were all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from diagnose.store.reader import RankLog

WHOLE_STEPS = "whole_steps"


def rank_of(log: RankLog) -> int:
    """Returns a rank's number in its job."""
    return int(log.meta.get("rank", 0))


def whole_steps(log: RankLog) -> int:
    """Returns of how many steps a log's running totals are: also of a part of it."""
    return int(log.meta.get(WHOLE_STEPS, len(log.steps)))


def part_of(log: RankLog, first: int, last: int | None = None) -> RankLog:
    """Returns a rank's records of the steps from `first` to before `last` (default: the end).

    What is kept as running totals stays whole, for there is no taking it apart: `whole_steps` says of how
    many steps. Workers that came after the part are left out of it.
    """
    end = len(log.steps) if last is None else min(last, len(log.steps))

    def inside(step: int) -> bool:
        return first <= step < end

    after_ns = log.steps[end, 0] if end < len(log.steps) else None
    return replace(
        log,
        meta=moved_meta(log, lambda step: step - first if inside(step) else None),
        workers=[report for report in log.workers if not _came_after(report, after_ns)],
        steps=log.steps[first:end],
        device_steps=log.device_steps[first:end],
        samples=[
            (step - first, slot, stack, weight) for step, slot, stack, weight in log.samples if inside(step)
        ],
        events=[
            (time, step - first, kind, detail) for time, step, kind, detail in log.events if inside(step)
        ],
        vitals=[(time, step - first, totals) for time, step, totals in log.vitals if inside(step)],
    )


def moved_meta(log: RankLog, moved: Callable[[int], int | None]) -> dict[str, Any]:
    """Returns what a rank said of itself, for a part of its records: the steps at which epochs began are
    those of the part.

    Args:
        log: The records.
        moved: Returns which step of the part a step is; `None` where it is none.
    """
    meta = {**log.meta, WHOLE_STEPS: whole_steps(log)}
    facts = meta.get("facts", {})
    for name in facts.keys() & {"loaders", "evaluating"}:
        loaders = []
        for fact in facts[name]:
            starts = [[*map(moved, start[:2]), *start[2:]] for start in fact.get("starts", ())]
            within = [start for start in starts if None not in start[:2]]
            untold = fact.get("starts_end")  # the first step of the part from which on none is known
            if untold is not None:
                later = map(moved, range(untold, len(log.steps)))
                untold = next((step for step in later if step is not None), None)
            known = {"starts": within, "starts_end": untold} if "starts" in fact else {}
            loaders.append({**fact, **known})
        meta["facts"] = {**meta["facts"], name: loaders}
    return meta


def _came_after(report: dict[str, Any], after_ns: int | None) -> bool:
    """Whether a worker's first batch was made after a time."""
    history = report.get("history", [])
    return after_ns is not None and bool(history) and history[0][0] > after_ns
