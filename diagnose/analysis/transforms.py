"""How much of the workers' time passes in transforms: what is done to a sample once it has been read.

By the convention of datasets a transform is an object that is called with a sample, or goes by such a name:
`self.transform(image)`. So is what a data set gives a sample in place of itself, whatever it is called:
`image = self.shade(image)`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace

from diagnose.analysis.loaders import facts_of
from diagnose.analysis.reading import MIN_SAMPLED_NS
from diagnose.core.input import InputStats
from diagnose.source.batch_work import GETS, UNPACKS
from diagnose.source.batch_work import READS as READING
from diagnose.source.names import words
from diagnose.source.sources import Sources
from diagnose.store.reader import Frame, RankLog

NAMES = """
    augment augmentation augmentations augmented augmenter augments preprocess preprocessing
    transform transformed transforms
    blur denoise distort elastic featurise featurize featurizer jitter normalise normalize resample resize
    reverb reverberate rotate spectrogram tokenise tokenize warp
"""
WORDS = frozenset(NAMES.split())
"""A function that has one of these in its name is a transform. Not `crop` nor `noise`: the one may be how a
sample is cut out of what is read, the other the sample."""

READS = frozenset({*READING, "decoder", "fetcher", "imread", "loader", "reader"})
"""A function or an object that has one of these in its name gets a sample, whatever else it does."""

CALLED = re.compile(r"\b([A-Za-z_]\w*)\s*\(")
"""The name of what a line calls."""

IN_PLACE = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*[\w.]*?(\w+)\(\s*\1\b")
"""A line that gives a name what a call makes of it: the name, and that of what is called."""

TAKES = {
    *("array", "as", "asarray", "ascontiguousarray", "bytes", "convert", "copy", "crop", "cut", "dict"),
    *("from", "int", "list", "str", "tensor", "tuple"),
}
"""Words of what only hands a sample on, or cuts it out, where a mapped file is read."""

DECODES = {"decode", "imread", "load", "open", "read"}
"""Words of functions of packages that get a sample, whatever needs it first: an opened picture is decoded
as it is first transformed."""

NO_SAMPLES = {"file", "idx", "index", "key", "name", "number", "path", "url"}
"""Words of what a sample is asked for by."""

NOT_CALLED = ("__getitem__", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
"""What a line goes into and calls by no name: `self.samples[index]`, and a loop of its own."""


def with_transforms(stats: InputStats, log: RankLog, sources: Sources) -> InputStats:
    """Adds to what is known of workers what transforms take of their time."""
    if stats.workers is None:
        return stats
    collates = {str(fact.get("collate", "")) for fact in facts_of(log)}
    share = transform_share(log.worker_samples, sources, collates)
    return replace(stats, workers=replace(stats.workers, transform_share=share))


def transform_share(
    samples: Iterable[tuple[tuple[Frame, ...], int]], sources: Sources, collates: Collection[str]
) -> float | None:
    """Returns the part of the sampled time in transforms, 0 to 1; `None` where samples are too few.

    Args:
        samples: Sampled stacks of workers, a package's frame first, and nanoseconds.
        sources: Where the text of a line is read.
        collates: Names of the functions that make batches, which are no transforms of a sample.
    """
    whole = inside = 0
    known: dict[tuple[Frame | None, Frame], bool] = {}
    named = [each for each in collates if not each.endswith(">")]  # a lambda shares its name with others
    beside = {name for each in named for name in (each, f"{each}.__call__")}
    for (package, *stack), weight in samples:
        whole += weight
        decodes = words(package[2].rpartition(".")[2]) & DECODES
        if decodes or any(function in beside for _, _, function in stack):
            continue
        calls = list(zip([None, *stack], stack, strict=False))
        for call in calls:
            if call not in known:
                known[call] = _is_transform(*call, sources)
        inside += weight * any(known[call] for call in calls)
    return inside / whole if whole >= MIN_SAMPLED_NS else None


def _is_transform(inner: Frame | None, frame: Frame, sources: Sources) -> bool:
    """Whether a frame runs a transform, or a line that is seen to call one.

    Args:
        inner: The user's frame that this one has called; `None` where there is none.
        frame: The frame.
        sources: Where the text of its line is read.
    """
    file, line, function = frame
    *around, own = function.split(".")
    if own == "__call__":
        return bool(around) and not words(around[-1]) & READS  # Python 3.10 does not tell whose it is
    if words(own) & WORDS:
        return not words(own) & READS
    text = sources.line(file, line)
    changed = IN_PLACE.match(text) if own == "__getitem__" else None
    if changed is not None and not words(changed[1]) & NO_SAMPLES:
        return _is_in_place(changed[2], inner, text)
    called = CALLED.findall(text)
    if not any(words(name) & WORDS for name in called):
        return False
    if inner is None:  # of a line that reads a sample, too, nothing tells which of both it was
        return not any(words(name) & READS for name in called)
    # Who is called by its own name is judged by that; a transform is often called by another.
    return inner[2].rpartition(".")[2] not in (*called, *NOT_CALLED)


def _is_in_place(name: str, inner: Frame | None, text: str) -> bool:
    """Whether a line that gives a sample what a call makes of it transforms it there, by the name of what
    is called: not where something else that the line calls reads another sample."""
    if words(name) & (READS | GETS | UNPACKS | TAKES):
        return False
    called = CALLED.findall(text)
    if inner is None:
        return not any(words(each) & READS for each in called)
    within = inner[2].rpartition(".")[2]
    return within == name or within not in (*called, *NOT_CALLED)
