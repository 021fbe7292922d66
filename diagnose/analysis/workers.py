"""What the worker processes did that fed training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from diagnose.analysis.loaders import facts_of, order_of, together
from diagnose.core.input import SlowBatch, WorkerStats
from diagnose.core.ledger import COLUMNS
from diagnose.core.workers import NOT_TRAINING, PER_OCTAVE
from diagnose.store.reader import RankLog

TAIL = 2.0
"""A batch that takes so many times the median is a slow one."""

MIN_GROWTH_POINTS = 4
"""Points of a worker's history that it takes to see its memory grow: some eight seconds."""

MAX_SLOWEST = 8
"""So many of the slowest batches of all workers are told."""

MIN_TAIL_BATCHES = 20
"""Fewer batches have no median and no tail worth the name."""


def worker_stats(log: RankLog) -> WorkerStats | None:
    """Returns what the worker processes did that fed training: those of the loader that fed most steps."""
    reports = [worker for worker in log.workers if worker.get("loader") != NOT_TRAINING]
    main = order_of(log)[:1]
    reports = [worker for worker in reports if worker.get("loader") in main] or reports
    if not reports:
        return None

    def total(key: str) -> float:
        return float(sum(report.get(key) or 0 for report in reports))

    batches = max(1.0, total("batches"))
    busy_ns = total("fetch_ns") + total("collate_ns")
    counters = log.meta.get("counters", {})
    with_workers = [number for number in together(log) if facts_of(log)[number].get("num_workers")]
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
        piped_bytes=max(
            (report["piped_bytes"] for report in reports if "piped_bytes" in report), default=None
        ),
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
    facts = dict(enumerate(facts_of(log)))
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
