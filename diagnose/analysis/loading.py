"""How the loaders kept up: waits step by step, and what changed over the run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.loaders import batches_per_step, begins_anew, facts_of, main_wait_share, together
from diagnose.analysis.series import SPIKE_DEVIATIONS, SPIKE_STEP_SHARE, find_period
from diagnose.analysis.spans import whole_steps
from diagnose.analysis.workers import worker_stats
from diagnose.core.input import InputStats
from diagnose.core.ledger import COLUMNS, COUNTS, FIRST_GAP
from diagnose.core.phases import Phase
from diagnose.core.units import MAD_TO_SIGMA
from diagnose.store.reader import RankLog

COMPUTE = [COLUMNS.index(phase.value) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)]

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What the waits of single steps show.

    Attributes:
        starts: Steps, from 0 of the measured ones, in which an epoch begins or its first batch is awaited.
        wait_ns: Nanoseconds in `next(loader)` and `iter(loader)`, shape `(steps,)`.
        step_ns: Nanoseconds of each step.
        compute_ns: Nanoseconds in forward, backward and optimizer.
        gap_ns: Nanoseconds between hooked calls, in the code of the loop itself.
        epochs: Epochs that begin in these steps.
    """

    starts: npt.NDArray[np.int64]
    wait_ns: Vector
    step_ns: Vector
    compute_ns: Vector
    gap_ns: Vector
    epochs: int


def input_stats(log: RankLog, warmup: int, waiting_ns: Vector | None = None) -> InputStats:
    """Analyses how training batches came to be.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
        waiting_ns: What each of the other steps waits for its batch by what its lines serve, which counts
            where another thread takes the batches from the loaders: then no hook sees the loop wait.
    """
    rows = log.steps[warmup:]
    per_step = batches_per_step(log)
    fetch_ns, collate_ns = _on_training_thread(log, rows, per_step)
    waits = waits_of(log, rows, warmup)
    aside = _asked_aside(log)
    if aside and waiting_ns is not None:
        waits = replace(waits, wait_ns=waiting_ns[: len(waits.wait_ns)])
    early_read, late_read = reading_rates(log, len(log.steps))
    stats = InputStats(
        fetch_ns=fetch_ns,
        collate_ns=collate_ns,
        collate_cpu_share=_collate_cpu_share(log),
        workers=worker_stats(log),
        loaders_per_step=max(1, len(together(log))),
        main_wait_share=main_wait_share(log),
        batches_per_step=per_step or None,
        early_read_bytes=early_read,
        late_read_bytes=late_read,
        collected_share=_collected_share(log),
        asked_aside=aside,
    )
    if not len(rows):
        return stats
    if not per_step:
        return _with_regular_gaps(stats, waits)
    epochs = round(waits.epochs * len(rows) / len(waits.wait_ns))
    leaves = begins_anew(log)
    anew = any(
        fact.get("num_workers") and (leaves or not fact.get("persistent_workers")) for fact in facts_of(log)
    )
    stats = replace(_with_waits(stats, waits, anew=anew), epoch_starts=epochs)
    return _with_drawing(stats, log, epochs / len(rows))


def _with_drawing(stats: InputStats, log: RankLog, epochs_per_step: float) -> InputStats:
    """Adds what drawing samples takes per step, for workers at the beginnings of epochs and else."""
    counters = log.meta.get("counters", {})
    if counters.get("own_draws"):
        own_ns = counters["own_drawn_ns"] / max(1, whole_steps(log))
        stats = replace(stats, own_drawing_ns=own_ns)
    epochs = sum(fact["epochs"] for fact in facts_of(log))
    if not counters.get("draws") or not epochs:
        return stats
    return replace(
        stats,
        drawing_ns=counters["drawn_ns"] / max(1, whole_steps(log)),
        epoch_drawing_ns=counters["drawn_first_ns"] / epochs * epochs_per_step,
    )


def _collected_share(log: RankLog) -> float | None:
    """Returns the part of the collector's time that passed in waits for batches."""
    counters = log.meta.get("counters", {})
    collected_ns = counters.get("collected_ns", 0)
    return counters["collected_waiting_ns"] / collected_ns if collected_ns else None


def _asked_aside(log: RankLog) -> bool:
    """Whether another thread takes most training batches from their loaders, for the loop."""
    counters = log.meta.get("counters", {})
    return bool(counters.get("asked_aside", 0) > counters.get("batches", 0))


def waits_of(log: RankLog, rows: npt.NDArray[np.int64], warmup: int) -> Waits:
    """Returns the waits of measured steps, and which of the steps begin an epoch.

    Of a run of very many epochs only the first beginnings are known; what comes after them is left out.
    """
    ends = [fact["starts_end"] - warmup for fact in facts_of(log) if fact.get("starts_end") is not None]
    known = min([len(rows), *(end for end in ends if end > 0)])
    rows = rows[:known]
    starts = [start[:2] for fact in facts_of(log) for start in fact.get("starts", ())]

    def within(steps: Iterable[int]) -> list[int]:
        return sorted({step - warmup for step in steps if warmup <= step < warmup + known})

    return Waits(
        starts=np.array(within(step for start in starts for step in start), dtype=np.int64),
        wait_ns=rows[:, COLUMNS.index(Phase.DATA_WAIT.value)].astype(float),
        step_ns=rows[:, len(COUNTS) :].sum(axis=1).astype(float),
        compute_ns=rows[:, COMPUTE].sum(axis=1).astype(float),
        gap_ns=rows[:, len(COUNTS) + FIRST_GAP :].sum(axis=1).astype(float),
        epochs=len(within(first for _, first in starts)),
    )


def _with_waits(stats: InputStats, waits: Waits, *, anew: bool) -> InputStats:
    """Adds what the waits show; `anew` tells that each epoch starts its own workers, or fills them anew."""
    count = len(waits.wait_ns)
    steady = np.ones(count, dtype=bool)
    steady[waits.starts] = False
    if not steady.any() and anew:  # each step waits for workers that have just been started, or emptied
        return replace(stats, epoch_start_ns=float(waits.wait_ns.mean()), steady_wait_ns=0.0)
    if not steady.any():
        steady[:] = True
    usual_waits = waits.wait_ns[steady]
    usual = float(np.median(usual_waits))
    far = are_far(usual_waits, waits.step_ns)
    quarter = max(1, len(usual_waits) // 4)
    mean_wait = float(usual_waits.mean())
    return replace(
        stats,
        epoch_start_ns=_beyond(waits.wait_ns, steady) / count,
        epoch_start_compute_ns=_beyond(waits.compute_ns, steady) / count,
        epoch_start_gap_ns=_beyond(waits.gap_ns, steady) / count,
        steady_gap_ns=float(waits.gap_ns[steady].mean()),
        steady_wait_ns=mean_wait,
        burst_ns=float((usual_waits[far] - usual).sum()) / len(usual_waits),
        burst_share=float(far.mean()),
        burst_period=find_period(np.flatnonzero(far)),
        early_wait_ns=float(usual_waits[:quarter].mean()),
        late_wait_ns=float(usual_waits[-quarter:].mean()),
    )


def _with_regular_gaps(stats: InputStats, waits: Waits) -> InputStats:
    """Adds what steps that come regularly take beyond the others between hooked calls.

    Without a loader they may begin epochs.
    """
    far = are_far(waits.gap_ns, waits.step_ns)
    if find_period(np.flatnonzero(far)) is None or far.all():
        return stats
    return replace(
        stats,
        epoch_starts=int(far.sum()),
        epoch_start_ns=0.0,
        epoch_start_gap_ns=_beyond(waits.gap_ns, ~far) / len(far),
        steady_gap_ns=float(waits.gap_ns[~far].mean()),
    )


def are_far(times_ns: Vector, step_ns: Vector) -> npt.NDArray[np.bool_]:
    """Returns which of these times are far longer than usual, also as a part of a usual step."""
    usual = float(np.median(times_ns))
    spread = MAD_TO_SIGMA * float(np.median(np.abs(times_ns - usual)))
    least = max(SPIKE_STEP_SHARE * float(np.median(step_ns)), SPIKE_DEVIATIONS * spread)
    return times_ns - usual > least


def _beyond(times_ns: Vector, steady: npt.NDArray[np.bool_]) -> float:
    """Returns what the other steps took beyond the mean of the steady ones, all together."""
    return max(0.0, float((times_ns[~steady] - times_ns[steady].mean()).sum()))


def _on_training_thread(
    log: RankLog, rows: npt.NDArray[np.int64], per_step: float
) -> tuple[float | None, float | None]:
    """Returns fetch and collate per batch, as far as the training thread does them."""
    counters = log.meta.get("counters", {})
    if not counters.get("collates"):
        return None, None
    # A ratio, so that the noise that fetch and collate of one batch share does not move time between them.
    collating = min(1.0, counters["collate_ns"] / max(1, counters["collated_wait_ns"]))
    wait_ns = float(rows[:, COLUMNS.index(Phase.DATA_WAIT.value)].mean()) if len(rows) else 0.0
    wait_ns /= per_step or 1.0
    drawn_ns = counters.get("own_drawn_ns", 0) / max(1, counters.get("own_draws", 0))
    return max(0.0, wait_ns * (1 - collating) - drawn_ns), wait_ns * collating


def _collate_cpu_share(log: RankLog) -> float | None:
    """Returns the part of its collating that the training thread was on a CPU."""
    counters = log.meta.get("counters", {})
    if not counters.get("collates") or "collate_cpu_ns" not in counters:
        return None
    return float(min(1.0, counters["collate_cpu_ns"] / max(1, counters["collate_ns"])))


def reading_rates(log: RankLog, num_steps: int) -> tuple[float | None, float | None]:
    """Returns bytes read from storage per step, by process and workers, in the first quarter of the run's
    time and in the last."""
    vitals = log.training_vitals
    if len(vitals) < 2 or not num_steps:
        return None, None
    begin, end = vitals[0][0], vitals[-1][0]
    own = [(time_ns, readings.get("read_bytes")) for time_ns, _, readings in vitals]
    tracks = [own]
    for report in log.workers:
        points = [(time_ns, read) for time_ns, _, _, read, _ in report.get("history", ())]
        if points and points[0][1] is not None:
            tracks.append([(points[0][0] - 1, 0), *points])
    if any(read is None for track in tracks for _, read in track):
        return None, None
    quarter = (end - begin) / 4
    if quarter <= 0:
        return None, None

    def grown(track: list[tuple[int, Any]], after: float, until: float) -> float:
        times, totals = zip(*track, strict=True)
        return float(np.interp(until, times, totals) - np.interp(after, times, totals))

    steps = [(time_ns, step) for time_ns, step, _ in vitals]

    def rate(after: float, until: float) -> float:
        return sum(grown(track, after, until) for track in tracks) / max(1.0, grown(steps, after, until))

    return rate(begin, begin + quarter), rate(end - quarter, end)
