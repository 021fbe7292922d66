"""One rank's steps: how long they took, which belong to the warm-up, and what each phase had of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.gaps import phase_weights, split_gaps
from diagnose.core.ledger import COLUMNS, COUNTS
from diagnose.core.phases import Phase
from diagnose.source.roles import Roles
from diagnose.store.reader import RankLog

WARMUP_CUTS = (1, 2, 3, 5, 8, 12, 16, 20)
"""Where the sampled lines can be cut off, too."""

WARMUP_SLOW = 2.0
"""A leading step that took this many times the median of the others belongs to the warm-up."""

MAX_WARMUP_SHARE = 0.25

Rows = npt.NDArray[np.int64]
"""Steps in the order of `core.ledger.COLUMNS`, shape `(steps, len(COLUMNS))`."""

Vector = npt.NDArray[np.float64]

GapParts = Mapping[int, Mapping[Phase, float]]
"""For each gap slot, the part of it that each phase has; see `split_gaps`."""


def step_times(steps: Rows) -> npt.NDArray[np.int64]:
    """Returns the wall time of each step in nanoseconds: the sum of its slots, shape `(steps,)`."""
    times: npt.NDArray[np.int64] = steps[:, len(COUNTS) :].sum(axis=1)
    return times


def find_warmup(steps: Rows) -> int:
    """Returns how many leading steps to leave out.

    The first always (it creates optimizer state and fills caches), then all up to the last leading one that
    was much slower than the rest or compiled, but never more than a quarter of the run.
    """
    times = step_times(steps)
    if len(times) < 2:
        return 0
    usual = float(np.median(times[len(times) // 2 :]))
    compiled = steps[:, COLUMNS.index(Phase.COMPILE.value)] > 0
    most = max(1, int(len(times) * MAX_WARMUP_SHARE))
    best = 1
    for cut in WARMUP_CUTS:
        if cut > most:
            break
        slow = times[best:cut] > WARMUP_SLOW * usual
        if slow.any() or compiled[best:cut].any():
            best = cut
    return best


def warmup_of(manifest: Mapping[str, Any], log: RankLog) -> int:
    """Returns how many leading steps of a rank to leave out: as the user said, else as is found."""
    asked = manifest.get("warmup")
    return find_warmup(log.steps) if asked is None else min(int(asked), len(log.steps))


def phase_series(log: RankLog, rows: Rows, warmup: int, roles: Roles) -> dict[Phase, Vector]:
    """Returns nanoseconds of each phase in each step; over the phases they sum to the step.

    A hooked phase is exact in each step. A gap is exact too, but it is divided in every step as the lines
    sampled in all of them divide it on average.

    Args:
        log: One rank's records.
        rows: Its measured steps.
        warmup: Leading steps whose samples are left out.
        roles: Tells what a line between hooks serves.
    """
    return divided(rows, split_gaps(log, warmup, roles))


def divided(rows: Rows, parts: GapParts) -> dict[Phase, Vector]:
    """Returns nanoseconds of each phase in each of these steps, with the gaps divided in these parts."""
    phases: dict[Phase, Vector] = {phase: np.zeros(len(rows)) for phase in Phase}
    for column, weights in zip(rows[:, len(COUNTS) :].T, phase_weights(parts), strict=True):
        if column.any():
            for phase, weight in zip(Phase, weights.tolist(), strict=True):
                if weight:
                    phases[phase] += weight * column
    return phases
