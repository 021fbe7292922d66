"""Where the ranks wait for each other's gradients, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.parallel import Meetings
from diagnose.store.reader import RankLog

Vector = npt.NDArray[np.float64]

MIN_STEPS = 20
"""Fewer steps do not tell a rank that is late from one that was."""

CALM = 0.25
"""A machine that is busy with something else is so in fewer steps than all but these."""

END = COLUMNS.index("end_ns")


def waits_of(log: RankLog, warmup: int) -> Vector:
    """Returns how long each measured step waited for the gradients of other ranks, in nanoseconds.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
    """
    rows = log.steps[min(warmup, len(log.steps)) :]
    waits = np.zeros(len(rows))
    if not len(rows) or not len(log.meetings):
        return waits
    begun_ns = int(rows[0, END]) - int(rows[0, len(COUNTS) :].sum())
    arrived, met = log.meetings[:, 0], log.meetings[:, 1]
    step = np.searchsorted(rows[:, END], arrived)
    inside = (arrived >= begun_ns) & (step < len(rows))
    np.add.at(waits, step[inside], (met - arrived)[inside])
    return waits


def meetings_of(waits: Mapping[int, Vector]) -> Meetings | None:
    """Compares the ranks' waits of the same step.

    Args:
        waits: Of each rank, as `waits_of` returns them.

    Returns:
        `None` with one rank, or where not all of them wait.
    """
    steps = min(map(len, waits.values()), default=0)
    if len(waits) < 2 or steps < MIN_STEPS:
        return None
    waits_RS = np.stack([one[:steps] for one in waits.values()])
    waits_RS = waits_RS[:, (waits_RS > 0).all(axis=0)]  # not those that only accumulate gradients
    met = waits_RS.shape[1]
    if met < MIN_STEPS:
        return None
    two_least = np.partition(waits_RS, 1, axis=0)[:2]
    last = waits_RS.argmin(axis=0)
    part = met / steps
    lateness = two_least[1] - two_least[0]
    return Meetings(
        num_steps=met,
        wait_ns={rank: part * float(one.mean()) for rank, one in zip(waits, waits_RS, strict=True)},
        common_ns=part * float(two_least[0].mean()),
        calm_ns=part * float(np.quantile(two_least[0], CALM)),
        last_share={rank: float((last == index).mean()) for index, rank in enumerate(waits)},
        held_ns={rank: part * float((lateness * (last == i)).mean()) for i, rank in enumerate(waits)},
    )


def own_collectives(communication: Sequence[Vector], waits: Sequence[Vector]) -> list[Vector]:
    """Returns what each rank spends in collectives that Python calls: all communication but the waits."""
    return [np.maximum(all_ns - ns, 0.0) for all_ns, ns in zip(communication, waits, strict=True)]
