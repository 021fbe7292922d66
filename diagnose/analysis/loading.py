"""How the loaders kept up: waits step by step, what workers did, and what changed over the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from diagnose.analysis.calls import call_at
from diagnose.analysis.series import MAD_TO_SIGMA, SPIKE_DEVIATIONS, SPIKE_STEP_SHARE, find_period
from diagnose.analysis.sources import Sources
from diagnose.analysis.spans import whole_steps
from diagnose.core.ledger import COLUMNS, COUNTS, FIRST_GAP
from diagnose.core.phases import Phase
from diagnose.core.profile import InputStats, SlowBatch, WorkerStats
from diagnose.core.program import Loader
from diagnose.core.workers import NOT_TRAINING, PER_OCTAVE
from diagnose.store.reader import RankLog

HALF = 2
"""Loaders that feed steps together have had as many batches made; the reports of one may be older."""

ROUNDING = 0.05
"""A run that is killed has asked for a few batches more than it has finished steps for."""

LEFT = 0.75
"""Beginnings of epochs for each batch that is asked for, from which on the loop takes one and leaves."""

TAIL = 2.0
"""A batch that takes so many times the median is a slow one."""

MIN_GROWTH_POINTS = 4
"""Points of a worker's history that it takes to see its memory grow: some eight seconds."""

MAX_SLOWEST = 8
"""So many of the slowest batches of all workers are told."""

MIN_TAIL_BATCHES = 20
"""Fewer batches have no median and no tail worth the name."""

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


def loaders_of(log: RankLog, sources: Sources) -> tuple[Loader, ...]:
    """Reads the loaders that fed training, the one that fed most steps first; of several that fed the same
    steps together, the one whose workers take longest.

    Args:
        log: One rank's records.
        sources: Where the text of the call that made each is read.
    """
    facts = [_facts(log)[index] for index in _order(log)]
    known = set(Loader.__dataclass_fields__)
    moved = bool(log.meta.get("facts", {}).get("batches_on_device"))
    return tuple(
        Loader(
            **{name: value for name, value in fact.items() if name in known},
            moves_batches=moved and not fact.get("num_workers"),
            construct_ns=fact.get("total_construct_ns", 0) / max(1, fact.get("epochs", 0)),
            call=call_at(sources, fact.get("file", ""), fact.get("line", 0), "DataLoader"),
        )
        for fact in facts
    )


def _order(log: RankLog) -> list[int]:
    """Returns the indices of the loaders' facts, in the order of `loaders_of`."""
    facts = _facts(log)
    latest = max((fact["begun_at"] for fact in facts), default=0)
    # Whoever feeds the steps since the last beginning has not been credited yet.
    since = max(0, whole_steps(log) - latest)
    steps = [fact["steps"] + since * (fact["begun_at"] == latest) for fact in facts]
    busy_ns = [0.0] * len(facts)
    for number, report in _reports(log):
        busy = report["fetch_ns"] + report["collate_ns"]
        busy_ns[number] += busy / max(1, facts[number]["num_workers"])
    for number, (_, wait_ns) in enumerate(_waits_by_loader(log) or ()):
        if number < len(facts) and not facts[number].get("num_workers"):
            busy_ns[number] = float(wait_ns)  # it makes its batches while it is waited for
    return sorted(range(len(facts)), key=lambda index: (-steps[index], -busy_ns[index]))


def _reports(log: RankLog) -> list[tuple[int, Mapping[str, Any]]]:
    """Returns what workers reported, each with the number of its loader, where that is known."""
    count = len(_facts(log))
    told = [(report.get("loader"), report) for report in log.workers]
    return [(number, report) for number, report in told if number is not None and 0 <= number < count]


def input_stats(log: RankLog, warmup: int, waiting_ns: Vector | None = None) -> InputStats:
    """Analyses how training batches came to be.

    Args:
        log: One rank's records.
        warmup: Leading steps to leave out.
        waiting_ns: What each of the other steps waits for its batch by what its lines serve, which counts
            where another thread takes the batches from the loaders: then no hook sees the loop wait.
    """
    rows = log.steps[warmup:]
    workers = worker_stats(log)
    batches_per_step = _batches_per_step(log)
    fetch_ns, collate_ns = _on_training_thread(log, rows, batches_per_step)
    waits = waits_of(log, rows, warmup)
    aside = _asked_aside(log)
    if aside and waiting_ns is not None:
        waits = replace(waits, wait_ns=waiting_ns[: len(waits.wait_ns)])
    early_read, late_read = reading_rates(log, len(log.steps))
    stats = InputStats(
        fetch_ns=fetch_ns,
        collate_ns=collate_ns,
        collate_cpu_share=_collate_cpu_share(log),
        workers=workers,
        loaders_per_step=max(1, len(_together(log))),
        main_wait_share=_main_wait_share(log),
        batches_per_step=batches_per_step or None,
        early_read_bytes=early_read,
        late_read_bytes=late_read,
        collected_share=_collected_share(log),
        asked_aside=aside,
    )
    if not len(rows) or not batches_per_step:
        return stats
    epochs = round(waits.epochs * len(rows) / len(waits.wait_ns))
    begins_anew = _begins_anew(log)
    anew = any(
        fact.get("num_workers") and (begins_anew or not fact.get("persistent_workers"))
        for fact in _facts(log)
    )
    stats = replace(_with_waits(stats, waits, anew=anew), epoch_starts=epochs)
    return _with_drawing(stats, log, epochs / len(rows))


def _with_drawing(stats: InputStats, log: RankLog, epochs_per_step: float) -> InputStats:
    """Adds what drawing samples for workers takes per step, at the beginnings of epochs and else."""
    counters = log.meta.get("counters", {})
    epochs = sum(fact["epochs"] for fact in _facts(log))
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


def _batches_per_step(log: RankLog) -> float:
    """Returns training batches per step: a whole number where there is one between two readings, since the
    making of an iterator counts as one, and an epoch that ends has asked once more, in vain.
    """
    counters = log.meta.get("counters", {})
    asks = counters.get("batches", 0) + counters.get("asked_aside", 0)
    epochs = sum(fact["epochs"] for fact in _facts(log))
    steps = max(1, whole_steps(log))
    most = asks / steps
    beside = epochs if _begins_anew(log) else 2 * epochs
    whole = ceil((asks - beside) / steps - ROUNDING)
    return float(whole) if 1 <= whole <= most else most


def _begins_anew(log: RankLog) -> bool:
    """Whether nearly each batch is the first of an epoch that has more: `next(iter(loader))` in every step.

    An epoch of one batch asks a second time, in vain, unless it is left: it has no more than half as many
    beginnings.
    """
    asks, epochs = log.meta.get("counters", {}).get("batches", 0), sum(f["epochs"] for f in _facts(log))
    longer = all(
        fact.get("dataset_length") is None or fact["dataset_length"] > (fact.get("batch_size") or 1)
        for fact in _facts(log)
    )
    return longer and epochs > LEFT * (asks - epochs) > 0


def _together(log: RankLog) -> list[int]:
    """Returns the numbers of the loaders that feed each step together, the main one first: such begin in
    the same step, and go as far.

    One of which the script has only looked at a batch before it trained has made fewer, and was asked less.
    """
    facts, order, waits = _facts(log), _order(log), _waits_by_loader(log)
    made = [0] * len(facts)
    for number, report in _reports(log):
        made[number] += report["batches"]
    found = order[:1]
    for number in order[1:]:
        fact, main = facts[number], facts[order[0]]
        by_workers, like_main = bool(fact.get("num_workers")), bool(main.get("num_workers"))
        if by_workers and like_main:
            as_often = HALF * made[number] >= made[order[0]]
        elif waits is not None:
            as_often = HALF * waits[number][0] >= waits[order[0]][0]
        else:
            as_often = by_workers >= like_main
        if as_often and all(fact[key] == main[key] for key in ("steps", "begun_at")):
            found.append(number)
    return found


def _waits_by_loader(log: RankLog) -> list[tuple[int, int]] | None:
    """Returns batches asked of each loader and nanoseconds waited for them, while there are several; `None`
    where there is one, or nobody looked."""
    waits = log.meta.get("facts", {}).get("waits")
    return None if waits is None else [(asked, wait_ns) for asked, wait_ns in waits]


def _main_wait_share(log: RankLog) -> float:
    """Returns the part of the waits that is for loaders with workers, if the main one has any, or else for
    those without; 1 where that is not known."""
    waits, together, facts = _waits_by_loader(log), _together(log), _facts(log)
    if waits is None or len(together) < 2:
        return 1.0
    total_ns = sum(waits[number][1] for number in together)
    by_workers = bool(facts[together[0]].get("num_workers"))
    like_main = [number for number in together if bool(facts[number].get("num_workers")) is by_workers]
    return sum(waits[number][1] for number in like_main) / total_ns if total_ns else 1.0


def waits_of(log: RankLog, rows: npt.NDArray[np.int64], warmup: int) -> Waits:
    """Returns the waits of measured steps, and which of the steps begin an epoch.

    Of a run of very many epochs only the first beginnings are known; what comes after them is left out.
    """
    ends = [fact["starts_end"] - warmup for fact in _facts(log) if fact.get("starts_end") is not None]
    known = min([len(rows), *(end for end in ends if end > 0)])
    rows = rows[:known]
    starts = [start[:2] for fact in _facts(log) for start in fact.get("starts", ())]

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
    spread = MAD_TO_SIGMA * float(np.median(np.abs(usual_waits - usual)))
    step_ns = float(np.median(waits.step_ns))
    far = usual_waits - usual > max(SPIKE_STEP_SHARE * step_ns, SPIKE_DEVIATIONS * spread)
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


def _beyond(times_ns: Vector, steady: npt.NDArray[np.bool_]) -> float:
    """Returns what the other steps took beyond the mean of the steady ones, all together."""
    return max(0.0, float((times_ns[~steady] - times_ns[steady].mean()).sum()))


def _on_training_thread(
    log: RankLog, rows: npt.NDArray[np.int64], batches_per_step: float
) -> tuple[float | None, float | None]:
    """Returns fetch and collate per batch, as far as the training thread does them."""
    counters = log.meta.get("counters", {})
    if not counters.get("collates"):
        return None, None
    # A ratio, so that the noise that fetch and collate of one batch share does not move time between them.
    collating = min(1.0, counters["collate_ns"] / max(1, counters["collated_wait_ns"]))
    wait_ns = float(rows[:, COLUMNS.index(Phase.DATA_WAIT.value)].mean()) if len(rows) else 0.0
    wait_ns /= batches_per_step or 1.0
    return wait_ns * (1 - collating), wait_ns * collating


def _collate_cpu_share(log: RankLog) -> float | None:
    """Returns the part of its collating that the training thread was on a CPU."""
    counters = log.meta.get("counters", {})
    if not counters.get("collates") or "collate_cpu_ns" not in counters:
        return None
    return float(min(1.0, counters["collate_cpu_ns"] / max(1, counters["collate_ns"])))


# -- workers


def worker_stats(log: RankLog) -> WorkerStats | None:
    """Returns what the worker processes did that fed training: those of the loader that fed most steps."""
    reports = [worker for worker in log.workers if worker.get("loader") != NOT_TRAINING]
    main = _order(log)[:1]
    reports = [worker for worker in reports if worker.get("loader") in main] or reports
    if not reports:
        return None

    def total(key: str) -> float:
        return float(sum(report.get(key) or 0 for report in reports))

    batches = max(1.0, total("batches"))
    busy_ns = total("fetch_ns") + total("collate_ns")
    counters = log.meta.get("counters", {})
    with_workers = [number for number in _together(log) if _facts(log)[number].get("num_workers")]
    asked = counters.get("asked", 0) if len(with_workers) < 2 else 0  # of all loaders together
    repeated, varied = sightings(reports)
    delays = [report.get("delay_ns") for report in reports]
    helped = [report.get("helper_cpu_ns") for report in reports if report.get("batches")]
    return WorkerStats(
        num_workers=len(reports),
        at_once=len({report.get("worker") for report in reports}),
        batches=int(total("batches")),
        fetch_ns=total("fetch_ns") / batches,
        collate_ns=total("collate_ns") / batches,
        send_ns=total("rest_cpu_ns") / batches,
        helper_ns=total("helper_cpu_ns") / batches if helped and None not in helped else None,
        cpu_share=min(1.0, total("cpu_ns") / busy_ns) if busy_ns else 0.0,
        idle_share=max(0.0, 1 - busy_ns / total("life_ns")) if total("life_ns") else 0.0,
        ready_batches=counters["ready"] / asked if asked else None,
        delay_share=min(1.0, total("delay_ns") / busy_ns) if busy_ns and None not in delays else None,
        busiest=_busiest(reports, log),
        slowest=slowest(log, reports),
        pieces=max((report.get("pieces") or 0 for report in reports), default=0) or None,
        private_growth_bytes=_private_growth(reports),
        repeated=repeated,
        varied=varied,
        **_tail(reports),
    )


def _tail(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    counts: dict[int, int] = {}
    longest_ns = 0
    for report in reports:
        longest_ns = max(longest_ns, int(report.get("longest_ns") or 0))
        for bucket, count in report.get("spread", ()):
            counts[bucket] = counts.get(bucket, 0) + count
    batches = sum(counts.values())
    if batches < MIN_TAIL_BATCHES:
        return {}
    buckets = sorted(counts)
    middles = np.array([2 ** ((bucket + 0.5) / PER_OCTAVE) for bucket in buckets])
    numbers = np.array([counts[bucket] for bucket in buckets])
    median = float(middles[np.searchsorted(np.cumsum(numbers), batches / 2)])
    slow = middles > TAIL * median
    total = float((middles * numbers).sum())
    return {
        "median_ns": median,
        "tail_share": float(((middles - median) * numbers)[slow].sum()) / total,
        "tail_batches": float(numbers[slow].sum()) / batches,
        "longest_ns": float(longest_ns),
    }


def slowest(log: RankLog, reports: Iterable[Mapping[str, Any]]) -> tuple[SlowBatch, ...]:
    """Returns the batches that took longest, of all workers."""
    ends = log.steps[:, COLUMNS.index("end_ns")]
    found = []
    for report in reports:
        for took_ns, there_ns, before, num_samples, samples in report.get("slowest", ()):
            step = int(np.searchsorted(ends, there_ns))
            found.append(
                SlowBatch(
                    took_ns=took_ns,
                    worker=report["worker"],
                    before=before,
                    step=step if step < len(ends) else None,
                    num_samples=num_samples,
                    samples=tuple(samples),
                )
            )
    return tuple(sorted(found, key=lambda batch: -batch.took_ns)[:MAX_SLOWEST])


def _busiest(reports: Sequence[Mapping[str, Any]], log: RankLog) -> float | None:
    """Returns the busiest worker's time relative to the mean one's; one that never reported was idle."""
    facts = dict(enumerate(_facts(log)))
    configured = [facts.get(report.get("loader", -1), {}).get("num_workers", 0) for report in reports]
    busy: dict[int, float] = {}
    for report in reports:  # of every epoch
        busy[report["worker"]] = busy.get(report["worker"], 0.0) + report["fetch_ns"] + report["collate_ns"]
    workers = max([*configured, len(busy)])
    mean = sum(busy.values()) / workers
    return max(busy.values()) / mean if workers > 1 and mean else None


def _private_growth(reports: Iterable[Mapping[str, Any]]) -> float | None:
    # The first point is left out: a new worker comes to own its own code and stacks, too.
    growths = [
        points[-1][4] - points[1][4]
        for points in (report.get("history", ()) for report in reports)
        if len(points) >= MIN_GROWTH_POINTS and None not in (points[-1][4], points[1][4])
    ]
    return float(np.mean(growths)) if growths else None


def sightings(reports: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
    """Returns how many watched samples came out the same each time they came, and how many did not."""
    sums: dict[int, list[int]] = {}
    for report in reports:
        for index, sum_ in report.get("sightings", ()):
            sums.setdefault(index, []).append(sum_)
    again = [seen for seen in sums.values() if len(seen) > 1]
    same = sum(len(set(seen)) == 1 for seen in again)
    return same, len(again) - same


# -- over the run


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


def _facts(log: RankLog) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = log.meta.get("facts", {}).get("loaders", [])
    return facts
