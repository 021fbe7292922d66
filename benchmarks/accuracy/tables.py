"""The answers and their score as markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from accuracy.score import NOTHING, Score, is_right, named, score, size_error
from accuracy.server import TURN_NS
from accuracy.truth import LAUNCHES, MIN_NOISES, MIN_TRUE_SHARE, SHARP, Answer

INTRODUCTION = """\
# Accuracy

How often the cause that `diagnose` names first is the one that is there. Printed by
`benchmarks/accuracy.py`. {heading}

- A *cell* is a training script of `benchmarks/accuracy/` with one fault of a wanted size. What the fault
  truly costs is measured at the same time, by a clock of the benchmark's own at the optimizer: the same job
  and seed with the fault and without, two processes that take turns every {turn_ms} ms, started
  {launches} times, and up to twice as often until the median is known to {sharp:.0%} of it. Where workers,
  threads or ranks go on while a job waits, whole runs take turns instead.
- A cell whose slowdown is less than {noises:g} times the noise, which is how much launches differ, or less
  than {share:.0%} of the step, is *unresolved*: counted, and judged nowhere.
- *Top 1*: the first finding has the fault's name; *top 3*: one of the first three. Where two names are as
  right the script says so, and why. A cell is judged by its first run; further runs of it, {launches} in
  all, are counted apart.
- *Size error*: predicted loss, the median of those runs, against true slowdown, as a part of it; median of
  the cells named right.
- *False alarm*: a finding that claims 5 % of the step or more in a job without fault.
- Every job keeps the memory that it frees (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`): else
  `page-faults` would be true of many, and of each to another extent in each of its runs.
- `noisy-neighbour` is true wherever the machine is shared. Where it was not injected it is neither right
  nor wrong, and only counted.
- Thresholds may have been chosen by looking at the *tuning* scripts. The *held-out* ones are others, in
  model, size and style, and nothing was fitted to them.
"""


def page(answers: Sequence[Answer], peers: Sequence[str] = ()) -> str:
    """Returns the whole page."""
    sets = sorted({answer.cell.script.set for answer in answers}, reverse=True)
    by_set = {name: [a for a in answers if a.cell.script.set == name] for name in sets}
    parts = [
        INTRODUCTION.format(
            heading=heading(),
            noises=MIN_NOISES,
            share=MIN_TRUE_SHARE,
            turn_ms=TURN_NS // 1_000_000,
            launches=LAUNCHES,
            sharp=SHARP,
        ),
        summary({name: score(of) for name, of in by_set.items()}),
        commits(answers),
        *peers,
    ]
    for name, of in by_set.items():
        scored = score(of)
        parts += [
            f"## {name.capitalize()}: classes\n\n{classes(scored)}",
            f"## {name.capitalize()}: confusion\n\n{confusion(scored)}",
            f"## {name.capitalize()}: every cell\n\n{every(of)}",
        ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def commits(answers: Sequence[Answer]) -> str:
    """Says at which commits kept answers were given; empty where none were kept."""
    counted = Counter(answer.commit for answer in answers if answer.commit)
    asked = ", ".join(f"{count} at {commit}" for commit, count in counted.most_common())
    return f"Cells by the commit of `diagnose` that was asked: {asked}." if asked else ""


def heading() -> str:
    """Returns when and where."""
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    cores = len(os.sched_getaffinity(0))
    return f"{datetime.date.today().isoformat()}; {cores} cores, {platform.system()}, {versions}, no GPU."


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a markdown table; all columns but the first are flush right."""
    lines = [head, ["---", *(["--:"] * (len(head) - 1))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def summary(scores: Mapping[str, Score]) -> str:
    """Returns the headline figures, a column for each set."""

    columns = list(scores.values())
    severities = sorted({severity for one in columns for severity, _, _ in one.by_severity})
    rows = [
        ("top 1", *(f"{percent(one.top_1)} of {one.asked}" for one in columns)),
        *(
            (
                f"top 1 at {severity} % of the step" if severity else "top 1 of faults without a size",
                *(_at(one, severity) for one in columns),
            )
            for severity in severities
        ),
        ("top 1 of further runs", *(f"{one.again[0]} of {one.again[1]}" for one in columns)),
        ("top 3", *(percent(one.top_3) for one in columns)),
        ("size error, median", *(f"{percent(one.size_error)} of {one.size_errors}" for one in columns)),
        ("false alarms on healthy jobs", *(f"{one.false_alarms} of {one.controls}" for one in columns)),
        ("pairs: one of the two first", *(f"{one.pairs_first} of {one.pairs}" for one in columns)),
        ("pairs: both among three", *(f"{one.pairs_both} of {one.pairs}" for one in columns)),
        ("decoys seen through", *(f"{one.decoys_right} of {one.decoys}" for one in columns)),
        ("missed as a reading was missing", *(str(one.abstained) for one in columns)),
        ("noisy-neighbour named beside", *(str(one.disturbed) for one in columns)),
        ("unresolved cells", *(str(one.unresolved) for one in columns)),
        ("failed jobs", *(str(one.failed) for one in columns)),
        ("classes", *(str(len(one.classes)) for one in columns)),
    ]
    return table(["", *scores], rows)


def _at(scored: Score, wanted: int) -> str:
    return next(
        (f"{right} of {of}" for severity, right, of in scored.by_severity if severity == wanted), ""
    )


def classes(scored: Score) -> str:
    """Returns precision and recall of each label."""
    return table(
        ["fault", "cells", "precision", "recall", "size error"],
        [
            (c.label, str(c.asked), percent(c.precision), percent(c.recall), percent(c.size_error))
            for c in scored.classes
        ],
    )


def confusion(scored: Score) -> str:
    """Returns true label against first name, leaving out empty rows; empty columns do not arise."""
    labels = sorted({label for label, _ in scored.confusion}, key=lambda name: (name == "healthy", name))
    rows = [
        (
            label,
            *(
                ", ".join(
                    f"{name} {count}" if count > 1 else name
                    for (true, name), count in scored.confusion.most_common()
                    if true == label and (name in _right(label)) is right
                )
                for right in (True, False)
            ),
        )
        for label in labels
    ]
    return table(["fault", "said rightly", "said wrongly"], rows)


def _right(label: str) -> tuple[str, ...]:
    return (NOTHING,) if label == "healthy" else (label,)


def every(answers: Iterable[Answer]) -> str:
    """Returns a row for each cell."""
    head = ["cell", "true", "noise", "said", "size error", "verdict"]
    return table(head, [row(answer) for answer in answers])


def row(answer: Answer) -> tuple[str, ...]:
    """Returns one cell's line."""
    if answer.job is None:
        return (str(answer.cell), "", "", "", "", "**failed**")
    error = size_error(answer)
    findings = ", ".join(f"{f.rule} {f.lost_share:.0%}" for f in answer.job.findings[:3]) or NOTHING
    right = "right" if is_right(answer) else "**wrong**"
    return (
        str(answer.cell),
        percent(answer.true_share),
        percent(answer.noise_share) if answer.true_share is not None else "",
        findings,
        percent(error),
        right if answer.resolved else f"unresolved ({', '.join(named(answer)[:1]) or NOTHING})",
    )


def percent(part: float | None) -> str:
    """Formats a part of one."""
    return "" if part is None else f"{100 * part:.0f} %"
