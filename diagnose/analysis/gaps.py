"""Divides the time between hooks among the phases that its source lines serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from diagnose.analysis.roles import Roles
from diagnose.core.ledger import FIRST_GAP, HOOKED, SLOTS
from diagnose.core.phases import Phase
from diagnose.store.reader import Frame, RankLog


def split_gaps(log: RankLog, warmup: int, roles: Roles) -> dict[int, dict[Phase, float]]:
    """Returns, for each gap slot that was sampled, the part of it that each phase has; the parts sum to 1.

    Args:
        log: One rank's records.
        warmup: Leading steps whose samples are left out.
        roles: Tells what a sampled line serves.
    """
    weights: dict[int, dict[Phase, float]] = {}
    for slot, stack, weight_ns in measured_samples(log, warmup):
        if slot >= FIRST_GAP:
            parts = weights.setdefault(slot, {})
            phase = roles.phase(stack[1:], slot)
            parts[phase] = parts.get(phase, 0.0) + weight_ns
    return {
        slot: {phase: weight / sum(parts.values()) for phase, weight in parts.items()}
        for slot, parts in weights.items()
    }


def phase_weights(parts: Mapping[int, Mapping[Phase, float]]) -> npt.NDArray[np.float64]:
    """Returns what part of each slot belongs to each phase, shape `(len(SLOTS), len(Phase))`.

    A gap of which no line was sampled is `OTHER`.
    """
    order = tuple(Phase)
    weights = np.zeros((len(SLOTS), len(order)))
    for slot, phase in enumerate(HOOKED):
        weights[slot, order.index(phase)] = 1.0
    for slot in range(FIRST_GAP, len(SLOTS)):
        for phase, part in parts.get(slot, {Phase.OTHER: 1.0}).items():
            weights[slot, order.index(phase)] = part
    return weights


def measured_samples(log: RankLog, warmup: int) -> Iterator[tuple[int, tuple[Frame, ...], int]]:
    """Yields slot, stack and nanoseconds of the samples taken after the warm-up.

    Samples are kept in buckets of steps. Where no bucket begins at the end of the warm-up or later, as in a
    run that ended soon after, the last bucket stands for the whole.
    """
    firsts = [first for first, slot, _, _ in log.samples if slot < len(SLOTS)]
    from_step = warmup if any(first >= warmup for first in firsts) else max(firsts, default=0)
    for first, slot, stack, weight_ns in log.samples:
        if first >= from_step and slot < len(SLOTS):
            yield slot, stack, weight_ns
