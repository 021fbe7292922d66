"""Counts how often the answers were right."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from accuracy.server import Job
from accuracy.truth import Answer

WORTH_SHARE = 0.05
"""A finding that claims less of the step is no false alarm: it says itself that it matters little."""

MOST_CLAIMED = 0.10
"""Of a fault that is hidden behind a bigger one, a finding may claim so much more than it truly costs."""

NOTHING = "nothing"
"""The verdict on a run without a finding."""


OF_THE_MACHINE = "noisy-neighbour"
"""Named rightly wherever the machine is shared, whatever the script: judged where it was injected, and
counted apart elsewhere."""


def named(answer: Answer) -> tuple[str, ...]:
    """Returns what was named, the most costly first, leaving out what hardly matters beside nothing."""
    assert answer.job is not None
    least = WORTH_SHARE if answer.cell.kind in ("control", "decoy") else 0.0
    return tuple(
        finding.rule
        for finding in answer.job.findings
        if finding.lost_share >= least
        and (finding.rule != OF_THE_MACHINE or OF_THE_MACHINE in answer.cell.right)
    )


def is_disturbed(answer: Answer) -> bool:
    """Whether the machine was said to be shared, in a job that had no neighbour of ours."""
    said = {finding.rule for finding in answer.job.findings} if answer.job else set()
    return OF_THE_MACHINE in said and OF_THE_MACHINE not in answer.cell.right


def verdict(answer: Answer) -> str:
    """Returns the first name, or that there was none."""
    return next(iter(named(answer)), NOTHING)


def is_right(answer: Answer) -> bool:
    """Whether the first name is right; of a healthy job, whether there is none."""
    if answer.cell.kind == "control":
        return verdict(answer) == NOTHING
    if answer.cell.kind == "decoy" and hidden_claim(answer) > MOST_CLAIMED + max(
        0.0, answer.true_share or 0
    ):
        return False
    return verdict(answer) in answer.cell.right


def hidden_claim(answer: Answer) -> float:
    """Returns what part of the step a decoy's hidden fault is said to take."""
    assert answer.job is not None
    hidden = answer.cell.faults[0].right
    behind = answer.cell.right
    return sum(f.lost_share for f in answer.job.findings if f.rule in hidden and f.rule not in behind)


def is_among_three(answer: Answer) -> bool:
    """Whether each fault has a right name among the first three."""
    first = named(answer)[:3]
    faults = answer.cell.faults[1:] if answer.cell.kind == "decoy" else answer.cell.faults
    return all(set(fault.right) & set(first) for fault in faults)


def size_error(answer: Answer) -> float | None:
    """Returns how far the predicted loss, the median of the judged runs, is from the true one, as a part of
    it; `None` where the first of them named nothing right."""
    assert answer.job is not None
    claims = [claim for job in (answer.job, *answer.more) if (claim := _claim(answer, job))]
    if not answer.true_share or not _claim(answer, answer.job) or answer.cell.kind == "decoy":
        return None
    return abs(statistics.median(claims) - answer.true_share) / answer.true_share


def _claim(answer: Answer, job: Job) -> float:
    """Returns what part of the step all right findings of a run claim."""
    return sum(finding.lost_share for finding in job.findings if finding.rule in answer.cell.right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Class:
    """One label's figures; `None` where there is nothing to divide by.

    Attributes:
        asked: Cells with that fault alone whose truth is known.
        precision: Of the runs in which it was named first, those that have it.
        recall: Of the cells, those in which it was named first.
    """

    label: str
    asked: int
    precision: float | None
    recall: float | None
    size_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Everything that is counted.

    Attributes:
        asked: Answers with one fault.
        unresolved: Cells whose true slowdown drowned in noise, or was none; judged nowhere.
        failed: Cells whose job could not be run.
        again: Further judged runs of answers with one fault, and in how many of them it was named first.
        abstained: Single faults that were not named first and whose rule missed a reading.
        disturbed: Jobs without neighbours of ours in which `noisy-neighbour` was named.
    """

    asked: int
    top_1: float | None
    top_3: float | None
    again: tuple[int, int]
    size_error: float | None
    size_errors: int
    controls: int
    false_alarms: int
    pairs: int
    pairs_first: int
    pairs_both: int
    decoys: int
    decoys_right: int
    unresolved: int
    failed: int
    abstained: int
    disturbed: int
    by_severity: tuple[tuple[int, int, int], ...]
    classes: tuple[Class, ...]
    confusion: Counter[tuple[str, str]]


def score(answers: Sequence[Answer]) -> Score:
    """Counts."""
    known = [answer for answer in answers if answer.resolved]
    of = {
        kind: [a for a in known if a.cell.kind == kind] for kind in ("single", "control", "pair", "decoy")
    }
    singles = of["single"]
    further = [replace(answer, job=job) for answer in singles for job in answer.more]
    errors = [error for answer in singles if (error := size_error(answer)) is not None]
    severities = sorted({answer.cell.severity for answer in singles})
    return Score(
        asked=len(singles),
        top_1=share(map(is_right, singles)),
        top_3=share(map(is_among_three, singles)),
        again=(sum(map(is_right, further)), len(further)),
        size_error=statistics.median(errors) if errors else None,
        size_errors=len(errors),
        controls=len(of["control"]),
        false_alarms=sum(not is_right(answer) for answer in of["control"]),
        pairs=len(of["pair"]),
        pairs_first=sum(map(is_right, of["pair"])),
        pairs_both=sum(map(is_among_three, of["pair"])),
        decoys=len(of["decoy"]),
        decoys_right=sum(map(is_right, of["decoy"])),
        unresolved=sum(answer.job is not None and not answer.resolved for answer in answers),
        failed=sum(answer.job is None for answer in answers),
        abstained=sum(_abstained(answer) for answer in singles),
        disturbed=sum(map(is_disturbed, answers)),
        by_severity=tuple(
            (severity, sum(map(is_right, at)), len(at))
            for severity in severities
            for at in [[answer for answer in singles if answer.cell.severity == severity]]
        ),
        classes=tuple(_class(label, singles, of["control"]) for label in sorted(_labels(singles))),
        confusion=Counter((a.cell.label, _credited(a)) for a in (*singles, *of["control"])),
    )


def share(truths: Iterable[bool]) -> float | None:
    """Returns the part that is true; `None` of none."""
    counted = list(truths)
    return sum(counted) / len(counted) if counted else None


def _abstained(answer: Answer) -> bool:
    assert answer.job is not None
    return not is_right(answer) and bool(set(answer.cell.right) & set(answer.job.abstained))


def _labels(singles: Iterable[Answer]) -> set[str]:
    return {answer.cell.label for answer in singles}


def _credited(answer: Answer) -> str:
    """The column of the confusion matrix: another right name counts as the label."""
    return answer.cell.label if answer.cell.faults and is_right(answer) else verdict(answer)


def _class(label: str, singles: list[Answer], controls: list[Answer]) -> Class:
    own = [answer for answer in singles if answer.cell.label == label]
    claimed = [answer for answer in (*singles, *controls) if _credited(answer) == label]
    errors = [error for answer in own if (error := size_error(answer)) is not None]
    return Class(
        label=label,
        asked=len(own),
        precision=share(answer.cell.label == label for answer in claimed),
        recall=share(map(is_right, own)),
        size_error=statistics.median(errors) if errors else None,
    )
