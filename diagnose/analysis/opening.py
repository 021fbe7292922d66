"""What workers read for their batches, and how much of their time passes where files are opened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from diagnose.analysis.reading import reading_shares
from diagnose.core.input import InputStats, Reading
from diagnose.core.workers import NOT_TRAINING
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame, RankLog

MIN_PART = 0.05
"""A line that opens fewer of the files is not where their time passes."""

COUNTED = 6
"""Figures that a worker tells of its files; of a run of before there are fewer."""


def with_reading(stats: InputStats, log: RankLog, sources: Sources) -> InputStats:
    """Adds to what is known of workers what they read, if they told."""
    reports = [report for report in log.workers if report.get("loader") != NOT_TRAINING]
    reading = reading_of(reports, log.worker_samples, sources)
    if stats.workers is None or reading is None:
        return stats
    return replace(stats, workers=replace(stats.workers, reading=reading))


def reading_of(
    reports: Iterable[Mapping[str, Any]],
    samples: Iterable[tuple[tuple[Frame, ...], int]],
    sources: Sources,
) -> Reading | None:
    """Returns what workers read for a batch, or `None` where no batch was looked into.

    Args:
        reports: What workers reported.
        samples: Sampled stacks of theirs, a package's frame first, and nanoseconds.
        sources: Where the text of a line is read.
    """
    told = [(*report["opened"], None)[:COUNTED] for report in reports if (report.get("opened") or [0])[0]]
    if not told:
        return None
    batches, num_samples, opens, read, made, reads = zip(*told, strict=True)
    total = sum(batches)
    shares = reading_shares(samples, sources, _places(reports))

    def mean(values: tuple[int | None, ...]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / total if len(known) == len(values) else None

    return Reading(
        opens=sum(opens) / total,
        reads=mean(reads),
        samples=mean(num_samples),
        read_bytes=mean(read),
        made_bytes=mean(made),
        share=shares.reading,
        asking_share=shares.asking,
    )


def _places(reports: Iterable[Mapping[str, Any]]) -> set[Frame]:
    """Returns the lines that open files, rare ones left out."""
    counts: dict[Frame, int] = {}
    for report in reports:
        for (file, line, function), count in report.get("opening") or ():
            counts[file, line, function] = counts.get((file, line, function), 0) + count
    return {place for place, count in counts.items() if count >= MIN_PART * sum(counts.values())}
