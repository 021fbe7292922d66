"""How much of the workers' time passes in transforms: what is done to a sample once it has been read.

By the convention of datasets a transform is an object that is called with a sample, or goes by such a name:
`self.transform(image)`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from diagnose.analysis.loaders import facts_of
from diagnose.analysis.opening import MIN_SAMPLED_NS
from diagnose.core.input import InputStats
from diagnose.source.sources import Sources
from diagnose.source.statements import words
from diagnose.store.reader import Frame, RankLog

NAMES = """
    augment augmentation augmentations augmented augmenter augments preprocess preprocessing
    transform transformed transforms
"""
WORDS = frozenset(NAMES.split())
"""A function that has one of these in its name is a transform."""

READS = frozenset({"decode", "decoder", "fetch", "fetcher", "load", "loader", "read", "reader"})
"""What has one of these in its name gets a sample, whether it can be called as an object or not."""

CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
"""The name of what a line calls."""


def with_transforms(stats: InputStats, log: RankLog, sources: Sources) -> InputStats:
    """Adds to what is known of workers what transforms take of their time."""
    if stats.workers is None:
        return stats
    collates = {str(fact.get("collate", "")) for fact in facts_of(log)}
    share = transform_share(log.worker_samples, sources, collates)
    return replace(stats, workers=replace(stats.workers, transform_share=share))


def transform_share(
    samples: Iterable[tuple[tuple[Frame, ...], int]], sources: Sources, collates: Collection[str] = ()
) -> float | None:
    """Returns the part of the sampled time in transforms, 0 to 1; `None` where samples are too few.

    Args:
        samples: Sampled stacks of workers, a package's frame first, and nanoseconds.
        sources: Where the text of a line is read.
        collates: Names of the functions that make batches, which are no transforms of a sample.
    """
    whole = inside = 0
    known: dict[Frame, bool] = {}
    beside = {name for each in collates for name in (each, f"{each}.__call__")}
    for (_, *stack), weight in samples:
        whole += weight
        if any(function in beside for _, _, function in stack):
            continue
        for frame in stack:
            if frame not in known:
                known[frame] = _is_transform(frame, sources)
        inside += weight * any(known[frame] for frame in stack)
    return inside / whole if whole >= MIN_SAMPLED_NS else None


def _is_transform(frame: Frame, sources: Sources) -> bool:
    """Whether a frame runs a transform, or a line that calls one."""
    file, line, function = frame
    *around, own = function.split(".")
    if own == "__call__":
        return bool(around) and not words(around[-1]) & READS  # Python 3.10 does not tell whose it is
    called = CALLED.findall(sources.line(file, line))
    return bool(words(own) & WORDS) or any(words(name) & WORDS for name in called)
