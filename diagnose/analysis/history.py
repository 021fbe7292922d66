"""A run's steps in a few hundred bins, for charts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from diagnose.analysis.late_bins import bin_width
from diagnose.analysis.readings import readings_of
from diagnose.core.history import LOSS, History, LateRanks, Loss
from diagnose.core.ledger import COLUMNS, COUNTS, FIRST_GAP, HOOKED, SLOTS
from diagnose.core.phases import Phase
from diagnose.core.units import NS_PER_MS, NS_PER_S
from diagnose.store.reader import RankLog

MAX_BINS = 256
"""A chart of a page's width has no room for more."""


def history_of(
    log: RankLog, gap_parts: Mapping[int, Mapping[Phase, float]], late: LateRanks | None
) -> History:
    """Sums all steps up in at most `MAX_BINS` bins, and takes what else can be drawn of the run.

    Args:
        log: One rank's records, every step of the run.
        gap_parts: For each gap slot, the part of it that each phase has; see `split_gaps`.
        late: How the ranks differ.
    """
    num_steps = len(log.steps)
    width = bin_width(num_steps, MAX_BINS)
    firsts = np.arange(0, num_steps, width)
    if not len(firsts):
        return History()
    sums = np.add.reduceat(log.steps, firsts, axis=0).astype(float)
    counts = np.diff(np.append(firsts, num_steps))
    slots_ms = sums[:, len(COUNTS) :] / counts[:, None] / NS_PER_MS
    phases = {phase: slots_ms[:, slot].copy() for slot, phase in enumerate(HOOKED)}
    phases[Phase.OTHER] = np.zeros(len(firsts))
    for slot in range(FIRST_GAP, len(SLOTS)):
        for phase, part in gap_parts.get(slot, {Phase.OTHER: 1.0}).items():
            phases[phase] += part * slots_ms[:, slot]
    samples = sums[:, COLUMNS.index("samples")]
    times_ns = slots_ms.sum(axis=1) * counts * NS_PER_MS
    rates = np.divide(samples * NS_PER_S, times_ns, out=np.zeros(len(firsts)), where=times_ns > 0)
    return History(
        width=width,
        phase_ms={phase: tuple(phases[phase].tolist()) for phase in Phase if phases[phase].any()},
        samples_per_s=tuple(rates.tolist()) if samples.any() else (),
        **readings_of(log),
        loss=loss_of(log.meta),
        late=late,
    )


def loss_of(meta: Mapping[str, Any]) -> Loss | None:
    """Returns the loss that a rank noted; `None` where it noted none, or what it noted is damaged."""
    noted: Any = meta.get(LOSS)
    try:
        width = int(noted["width"])
        means = tuple(math.nan if mean is None else float(mean) for mean in noted["means"])
    except (KeyError, TypeError, ValueError):
        return None
    if width < 1 or not any(map(math.isfinite, means)):
        return None
    return Loss(width=width, means=means)
