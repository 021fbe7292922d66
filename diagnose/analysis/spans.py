"""A part of a run, as if it were all of it."""

from __future__ import annotations

from dataclasses import replace

from diagnose.store.reader import RankLog


def part_of(log: RankLog, first: int, last: int | None = None) -> RankLog:
    """Returns a rank's records of the steps from `first` to before `last` (default: the end).

    What is kept as running totals, such as the workers' reports, stays whole: there is no taking it apart.
    """
    end = len(log.steps) if last is None else min(last, len(log.steps))

    def inside(step: int) -> bool:
        return first <= step < end

    return replace(
        log,
        steps=log.steps[first:end],
        samples=[
            (step - first, slot, stack, weight) for step, slot, stack, weight in log.samples if inside(step)
        ],
        events=[
            (time, step - first, kind, detail) for time, step, kind, detail in log.events if inside(step)
        ],
        vitals=[(time, step - first, totals) for time, step, totals in log.vitals if inside(step)],
    )
