"""Divides the time between hooks among the phases that its source lines serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from diagnose.analysis.device_ledger import BY_DEVICE
from diagnose.core.ledger import COUNTS, FIRST_GAP, HOOKED, SLOTS
from diagnose.core.phases import Phase
from diagnose.core.places import begins_ns, decoded
from diagnose.source.roles import Roles
from diagnose.store.reader import Frame, RankLog

CELL_SAMPLES = 8
"""Moments are taken together until so many samples were taken in them. Of fewer the chances grow again, of
more the moments are too long to tell two lines apart; between 4 and 32 it hardly matters."""

ENOUGH_STEPS = 20_000
"""A longer run is judged by about so many of its steps, evenly spaced."""


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


def measured_samples(log: RankLog, warmup: int) -> Iterator[tuple[int, tuple[Frame, ...], float]]:
    """Yields slot, stack and nanoseconds of the samples taken after the warm-up; see `placed_samples`."""
    for slot, _, stack, weight_ns in placed_samples(log, warmup):
        yield slot, stack, weight_ns


def placed_samples(log: RankLog, warmup: int) -> Iterator[tuple[int, int, tuple[Frame, ...], float]]:
    """Yields slot, place (see `core.places`), stack and nanoseconds of the samples taken after the warm-up.

    Samples are kept in buckets of steps. Where no bucket begins at the end of the warm-up or later, as in a
    run that ended soon after, the last bucket stands for the whole.

    The steps say how much time was spent at each moment of a slot; so what the samples of a moment stand
    for is corrected by it (post-stratification), whether more or fewer of them fell there by chance.
    """
    firsts = [first for first, code, _, _ in log.samples if decoded(code)[0] < len(SLOTS)]
    from_step = warmup if any(first >= warmup for first in firsts) else max(firsts, default=0)
    by_slot: dict[int, list[tuple[int, tuple[Frame, ...], int]]] = {}
    for first, code, stack, weight_ns in log.samples:
        slot, place = decoded(code)
        if first >= from_step and slot < len(SLOTS):
            by_slot.setdefault(slot, []).append((place, stack, weight_ns))
    rows = log.steps[warmup:] if len(log.steps) > warmup else log.steps
    rows = rows[:: 1 + len(rows) // ENOUGH_STEPS]
    of_one_ns = sum(weight for *_, weight in log.samples) / max(1, log.meta.get("samples") or 1)
    for slot, samples in by_slot.items():
        # The moments of samples are the host's: a device's clock says nothing of how long those took.
        factors = (
            {}
            if log.meta.get(BY_DEVICE)
            else _factors(samples, rows[:, len(COUNTS) + slot], CELL_SAMPLES * of_one_ns)
        )
        for place, stack, weight_ns in samples:
            yield slot, place, stack, weight_ns * factors.get(place, 1.0)


def _factors(
    samples: Iterable[tuple[int, tuple[Frame, ...], int]], slot_ns: npt.NDArray[np.int64], cell_ns: float
) -> dict[int, float]:
    """Returns for each place what its samples have to be multiplied by; the sum of all stays what it is.

    Args:
        samples: Place, stack and nanoseconds of the samples of one slot.
        slot_ns: Time that the slot took in each step.
        cell_ns: Neighbouring places are taken together until their samples weigh so much.
    """
    weights: dict[int, float] = {}
    for place, _, weight_ns in samples:
        weights[place] = weights.get(place, 0.0) + weight_ns
    if 0 in weights or not slot_ns.any():  # a run of an older version
        return {}
    cells: list[list[int]] = [[]]
    filled_ns = 0.0
    for place in sorted(weights):
        if filled_ns >= cell_ns:
            cells.append([])
            filled_ns = 0.0
        cells[-1].append(place)
        filled_ns += weights[place]
    if filled_ns < cell_ns and len(cells) > 1:
        cells[-2:] = [cells[-2] + cells[-1]]
    # A cell ends half way to the next; of a step, it had as much as the slot lasted from begin to end.
    ends = [(begins_ns(cell[-1] + 1) + begins_ns(after[0])) / 2 for cell, after in pairwise(cells)]
    until = np.array(
        [*(np.minimum(slot_ns, end).sum(dtype=float) for end in ends), slot_ns.sum(dtype=float)]
    )
    parts = np.diff(until, prepend=0.0) / until[-1]
    total_ns = sum(weights.values())
    return {
        place: float(part) * total_ns / sum(weights[place] for place in cell)
        for cell, part in zip(cells, parts, strict=True)
        for place in cell
    }
