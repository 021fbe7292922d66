"""How evenly the ranks' work is divided, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from diagnose.core.ledger import COLUMNS
from diagnose.core.parallel import Imbalance
from diagnose.core.phases import Phase
from diagnose.store.reader import RankLog

Vector = npt.NDArray[np.float64]

MIN_STEPS = 20
"""Steps that all ranks must have made: fewer carry no line."""

UNITS = ("tokens", "samples")
"""What the size of a batch is counted in, the more telling first."""


def imbalance_of(logs: Sequence[RankLog], warmup: int) -> Imbalance | None:
    """Compares the ranks' batches of the same step; `None` with one rank, or where sizes are not known.

    Args:
        logs: Of all ranks, each with a row per step.
        warmup: Leading steps to leave out.
    """
    steps = min((len(log.steps) for log in logs), default=0) - warmup
    ranks = [int(log.meta.get("rank", 0)) for log in logs]
    if len(set(ranks)) < 2 or len(set(ranks)) < len(ranks) or steps < MIN_STEPS:
        return None
    rows_RSC = np.stack([log.steps[warmup : warmup + steps] for log in logs]).astype(float)
    forward_RS = rows_RSC[:, :, COLUMNS.index(Phase.FORWARD.value)]
    for unit in UNITS:
        size_RS = rows_RSC[:, :, COLUMNS.index(unit)]
        if not (size_RS > 0).all():
            continue
        fit = _line(size_RS.ravel(), forward_RS.ravel())
        if fit is None:
            continue  # every batch is alike in this unit
        slope, correlation = fit
        fullest = size_RS.argmax(axis=0)
        return Imbalance(
            unit=unit,
            spread=float((size_RS.max(axis=0) - size_RS.mean(axis=0)).mean()),
            mean=float(size_RS.mean()),
            forward_ns_per_unit=slope,
            correlation=correlation,
            fullest={rank: float((fullest == index).mean()) for index, rank in enumerate(ranks)},
        )
    return None


def common_ns(series: Sequence[Mapping[Phase, Vector]], phase: Phase) -> float | None:
    """Returns what every rank spends in a phase: the mean over the steps of the rank that spends least.

    Ranks that take turns at being late each wait for the others on average, and none does in its own turn.

    Args:
        series: Of each rank, nanoseconds of each phase by step.
    """
    times = [one[phase] for one in series if phase in one]
    steps = min(map(len, times), default=0)
    if len(times) < 2 or len(times) < len(series) or not steps:
        return None
    return float(np.min([one[:steps] for one in times], axis=0).mean())


def late_shares(series: Sequence[Mapping[Phase, Vector]]) -> list[dict[Phase, float]]:
    """Returns, for each rank and phase, the part of the steps in which it took longest of all ranks.

    Args:
        series: Of each rank, nanoseconds of each phase by step.
    """
    shares: list[dict[Phase, float]] = [{} for _ in series]
    steps = min((len(times) for one in series for times in one.values()), default=0)
    if len(series) < 2 or not steps:
        return shares
    for phase in series[0]:
        times_RS = np.array([one[phase][:steps] if phase in one else np.zeros(steps) for one in series])
        latest = times_RS.argmax(axis=0)
        for index, share in enumerate(shares):
            share[phase] = float((latest == index).mean())
    return shares


def _line(x_N: Vector, y_N: Vector) -> tuple[float, float] | None:
    """Returns slope and correlation of a line through points, of which the highest are cut off."""
    if np.ptp(x_N) == 0:
        return None
    y_N = np.minimum(y_N, np.percentile(y_N, 98))  # a pause of the machine is no work
    slope = float(np.polyfit(x_N, y_N, 1)[0])
    spread = float(np.std(y_N))
    return slope, max(0.0, slope * float(np.std(x_N)) / spread) if spread else 0.0
