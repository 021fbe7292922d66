"""What workers read for their batches, and how much of their time passes where files are opened."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from diagnose.core.input import InputStats, Reading
from diagnose.core.workers import NOT_TRAINING
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame, RankLog

MIN_PART = 0.05
"""A line that opens fewer of the files is not where their time passes."""

MIN_SAMPLED_NS = 200_000_000
"""Some 50 samples of the workers; fewer divide their time too coarsely."""

With = ast.With | ast.AsyncWith


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
    told = [report["opened"] for report in reports if (report.get("opened") or [0])[0]]
    if not told:
        return None
    batches, num_samples, opens, read, made = zip(*told, strict=True)
    total = sum(batches)

    def mean(values: tuple[int | None, ...]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / total if len(known) == len(values) else None

    return Reading(
        opens=sum(opens) / total,
        samples=mean(num_samples),
        read_bytes=mean(read),
        made_bytes=mean(made),
        share=_share(_places(reports), samples, sources),
    )


def _places(reports: Iterable[Mapping[str, Any]]) -> set[Frame]:
    """Returns the lines that open files, rare ones left out."""
    counts: dict[Frame, int] = {}
    for report in reports:
        for (file, line, function), count in report.get("opening") or ():
            counts[file, line, function] = counts.get((file, line, function), 0) + count
    return {place for place, count in counts.items() if count >= MIN_PART * sum(counts.values())}


def _share(
    places: set[Frame], samples: Iterable[tuple[tuple[Frame, ...], int]], sources: Sources
) -> float | None:
    """Returns the part of the sampled time in lines that open files, and in what is done while they are
    open: `with open(path) as file: text = file.read()`."""
    whole = reading = 0
    blocks: dict[Frame, range] = {place: _block(place, sources) for place in places}
    for (_, *stack), weight in samples:
        whole += weight
        if not stack:
            continue
        file, line, function = stack[0]
        reading += weight * any(
            (file, function) == (place[0], place[2]) and line in block for place, block in blocks.items()
        )
    return reading / whole if whole >= MIN_SAMPLED_NS else None


def _block(place: Frame, sources: Sources) -> range:
    """Returns the lines of the `with` statement whose head opens a file; else the one line."""
    file, line, _ = place
    tree = sources.tree(file)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, With) and node.lineno <= line < node.body[0].lineno:
            return range(node.lineno, (node.end_lineno or line) + 1)
    return range(line, line + 1)
