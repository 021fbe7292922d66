"""Whose records the figures of runs are of: rates of some ranks are no rates of the whole job."""

from __future__ import annotations

from collections.abc import Sequence

from diagnose.gate.result import MeasuredRun

MOST_NOTES = 3
"""Runs of which is said what could not be read; what is wrong with one is often wrong with all."""


def why_other_ranks(first: MeasuredRun, run: MeasuredRun) -> str:
    """Says which rank one of two runs lacks and the other has; empty where they are of the same ranks."""
    for one, other in ((run, first), (first, run)):
        lacking = sorted(set(one.missing_ranks) - set(other.missing_ranks))
        if lacking:
            which = f"rank {lacking[0]}" if len(lacking) == 1 else f"{len(lacking)} ranks"
            return f"{which} recorded no step in {one.name} and did in {other.name}: died early?"
    return ""


def of_ranks(runs: Sequence[MeasuredRun]) -> tuple[str, ...]:
    """Says how many ranks were read where a job has several, and what could not be read."""
    read = sorted({len(run.ranks) for run in runs if run.ranks})
    missing = any(run.missing_ranks for run in runs)
    notes: list[str] = []
    if read and (missing or read[-1] > 1):
        number = " to ".join(map(str, dict.fromkeys((read[0], read[-1]))))
        world_size = max(len(run.ranks) + len(run.missing_ranks) for run in runs)
        of_all = f" of {world_size}" if missing else ""
        notes.append(
            f"{number}{of_all} ranks were read in each run: a step lasts until the last of them has ended "
            "it, and samples are those of all of them"
        )
    notes += [f"{run.name}: {note}" for run in runs for note in run.notes][:MOST_NOTES]
    return tuple(notes)
