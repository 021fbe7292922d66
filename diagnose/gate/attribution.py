"""What made the second of two versions slower, from the Profiles of paired runs of both.

The pair is the unit, as in the gate's verdict: every growth is estimated over pairs of runs made next to
each other, so a machine that slows down in the course of the job slows both sides of a pair alike.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.gate.cause import Growth, Kind, LineGrowth, NewFinding, PhaseGrowth, Why
from diagnose.gate.facts import fact_changes, for_same_work
from diagnose.gate.matching import Matching, relative
from diagnose.gate.result import Metric
from diagnose.gate.statistics import FEW_PAIRS
from diagnose.source.purposes import SYNC, SYNCHRONIZE

MIN_PAIRS = 5
"""Fewer pairs point one way by chance too often: four do so for one phase in sixteen, and there are ten."""

HUGE = 2.0
"""Where every step takes so many times as long, as few pairs attribute the loss as tell it."""

MIN_PART_OF_HUGE = 0.5
"""Of few pairs a phase is named when it grew in each and is half of the loss: at least half of a whole step
more, which is not chance."""

MIN_PART = 0.2
"""A phase is named when it is a fifth of the loss or more: five such would be all of it."""

WEIGHTY_SHARE = 0.05
"""Phases below this part of the step say nothing of whether all grew alike: they are mostly fixed cost."""

ALIKE = 2.0
"""Phases grew alike when the one that grew most, relative to itself, did so at most twice as much as the
one that grew least. A fault in one phase leaves the others where they are."""

MIN_ALIKE = 3
"""Two phases that grow alike may be forward and backward of a larger model."""

MIN_LINE_PART = 0.1
"""Lines below a tenth of the loss do not explain it."""

MIN_HOT_SHARE = 0.01
"""Lines below a hundredth of the step are not its hot path."""

MAX_LINES = 5

MAX_CHANCE = 0.05
"""A fault is new when chance puts it into these runs of the two sides in one of twenty gates at most. It is
no verdict: the regression is certain already."""

LineKey = tuple[str, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The runs of one version.

    Attributes:
        root: Where its sources lie, and still can be read.
        profiles: Its runs in the order of their pairs, their rules asked.
        renamed: Paths of its files by those that they had in the version before, where they differ.
    """

    root: Path
    profiles: tuple[Profile, ...]
    renamed: Mapping[str, str] = field(default_factory=dict)


def attribute(before: Runs, after: Runs, metric: Metric) -> Why:
    """Attributes the loss of the second side to phases, lines, faults and settings.

    Args:
        before: The first version.
        after: The second. Its runs are paired with those of the first by their order; where one side has
            more runs, the last of them have no pair and are left out.
        metric: What was judged.

    Returns:
        What could be told. That the second side is slower at all is for the gate to say: without a loss,
        nothing is named.
    """
    pairs = [
        pair
        for pair in zip(before.profiles, after.profiles, strict=False)
        if min(profile.step_time_ns for profile in pair) > 0
    ]
    num_pairs = len(pairs)
    ones, as_run = [one for one, _ in pairs], [other for _, other in pairs]
    others, work = for_same_work(ones, as_run, metric)
    step = growth([one.step_time_ns for one in ones], [other.step_time_ns for other in others])
    is_few = num_pairs < MIN_PAIRS
    if num_pairs < FEW_PAIRS or (is_few and not _is_huge(ones, others)):
        reason = f"{num_pairs} pairs of runs have records; {MIN_PAIRS} are needed"
        return Why(kind=Kind.CANNOT_TELL, reason=reason, num_pairs=num_pairs, step=step)
    phases = _phases(ones, others, step)
    kind, named = _named(phases, step, MIN_PART_OF_HUGE if is_few else MIN_PART)
    lines = _lines(ones, others, Matching(before.root, after.root, _renamed(before, after)))
    grown = [
        each for each in lines if each.growth.is_certain and each.growth.ns >= MIN_LINE_PART * step.ns > 0
    ]
    hot = [each for each in lines if each.after_ns >= MIN_HOT_SHARE * (step.before_ns + step.ns)]
    return Why(
        kind=kind,
        reason=_reason(step, phases, num_pairs) if kind is Kind.CANNOT_TELL else "",
        num_pairs=num_pairs,
        step=step,
        phases=tuple(named),
        shrank=tuple(each for each in phases[::-1] if each.growth.high_ns < 0 and each.part <= -MIN_PART),
        lines=tuple(sorted(grown, key=lambda each: -each.growth.ns)[:MAX_LINES]),
        new_waits=tuple([each for each in hot if each.growth.before_ns == 0 and _waits(each)][:MAX_LINES]),
        hot_diff=tuple([each for each in hot if each.in_diff and each.growth.high_ns > 0][:MAX_LINES]),
        findings=tuple(_new_findings(ones, as_run, after.root)),
        facts=fact_changes(ones, as_run),
        work=work,
    )


def _is_huge(ones: Sequence[Profile], others: Sequence[Profile]) -> bool:
    return all(
        other.step_time_ns >= HUGE * one.step_time_ns for one, other in zip(ones, others, strict=True)
    )


def growth(before: Sequence[float], after: Sequence[float]) -> Growth:
    """Estimates paired growth, with the 99 % interval of the signed-rank test.

    With fewer pairs than that test needs, the interval is from the least to the greatest difference.
    """
    differences = np.asarray(after, dtype=float) - np.asarray(before, dtype=float)
    count = len(differences)
    if not count:
        return Growth(before_ns=0.0, ns=0.0, low_ns=0.0, high_ns=0.0)
    one, other = np.triu_indices(count)
    walsh = np.sort((differences[one] + differences[other]) / 2)
    mean = count * (count + 1) / 4
    rank = int(mean - 2.576 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24))
    rank = max(0, min(rank, len(walsh) // 2 - 1))
    return Growth(
        before_ns=statistics.median(before),
        ns=float(np.median(walsh)),
        low_ns=float(walsh[rank]),
        high_ns=float(walsh[-1 - rank]),
    )


def _phases(ones: Sequence[Profile], others: Sequence[Profile], step: Growth) -> list[PhaseGrowth]:
    """Returns every measured phase, the largest growth first."""
    found = []
    for phase in Phase:
        if not any(phase in profile.phase_time_ns for profile in (*ones, *others)):
            continue
        grown = growth(
            [profile.spent_ns(phase) for profile in ones],
            [profile.spent_ns(phase) for profile in others],
        )
        part = grown.ns / step.ns if step.ns > 0 else 0.0
        found.append(PhaseGrowth(phase=phase, growth=grown, part=part))
    return sorted(found, key=lambda each: -each.growth.ns)


def _named(
    phases: Sequence[PhaseGrowth], step: Growth, min_part: float
) -> tuple[Kind, Sequence[PhaseGrowth]]:
    if step.ns <= 0:
        return Kind.CANNOT_TELL, ()
    weighty = [each for each in phases if each.growth.before_ns >= WEIGHTY_SHARE * step.before_ns]
    if len(weighty) >= MIN_ALIKE and all(each.growth.is_certain for each in weighty):
        relative_growth = [each.growth.ns / each.growth.before_ns for each in weighty]
        if max(relative_growth) <= ALIKE * min(relative_growth):
            return Kind.EVENLY, weighty
    certain = [each for each in phases if each.growth.is_certain and each.part >= min_part]
    return (Kind.PHASES, certain) if certain else (Kind.CANNOT_TELL, ())


def _reason(step: Growth, phases: Sequence[PhaseGrowth], num_pairs: int) -> str:
    if step.ns <= 0:
        return "the mean step did not grow: what was lost is not in the time of the steps"
    if num_pairs < MIN_PAIRS:
        return f"no phase is half of the loss or more, which {num_pairs} pairs would tell"
    largest = phases[0]
    return (
        f"no phase grew by more than its own noise from run to run; the largest growth, "
        f"in {largest.phase.label}, may be chance"
    )


def _renamed(before: Runs, after: Runs) -> dict[str, str]:
    """Two commands may run two scripts: then the second is the first, renamed."""
    renamed = dict(after.renamed)
    if not before.profiles or not after.profiles:
        return renamed
    one = relative(before.profiles[0].run.script, before.root)
    other = relative(after.profiles[0].run.script, after.root)
    if one != other and one.endswith(".py") and other.endswith(".py"):
        renamed[one] = other
    return renamed


def _waits(line: LineGrowth) -> bool:
    return line.phase in (Phase.COMMUNICATION, Phase.COMPILE) or bool({SYNC, SYNCHRONIZE} & {*line.idiom})


def _lines(ones: Sequence[Profile], others: Sequence[Profile], matching: Matching) -> list[LineGrowth]:
    """Returns every sampled line of either side, the most costly in the second first."""
    shown: dict[LineKey, SourceLine] = {}

    def before_key(line: SourceLine) -> LineKey | None:
        file, number = matching.place_before(line.file, line.line)
        return None if number is None else (file, number, line.in_worker)

    def after_key(line: SourceLine) -> LineKey:
        return (matching.place_after(line.file), line.line, line.in_worker)

    after = [_times(profile, after_key, shown) for profile in others]
    before = [_times(profile, before_key, shown) for profile in ones]
    found = []
    for key in {key for times in (*before, *after) for key in times}:
        file, number, in_worker = key
        line = shown[key]
        took = [times.get(key, 0.0) for times in after]
        found.append(
            LineGrowth(
                phase=line.phase,
                file=file,
                line=number,
                function=line.function,
                text=line.text,
                growth=growth([times.get(key, 0.0) for times in before], took),
                after_ns=statistics.median(took),
                in_worker=in_worker,
                in_diff=matching.in_diff(file, number),
                idiom=line.idiom,
            )
        )
    return sorted(found, key=lambda each: (-each.after_ns, each.file, each.line))


def _times(
    profile: Profile,
    key_of: Callable[[SourceLine], LineKey | None],
    shown: dict[LineKey, SourceLine],
) -> dict[LineKey, float]:
    """Returns nanoseconds by line: per step, or, of a line of workers, per batch. Without a key, a line is
    left out."""
    workers = profile.input.workers
    batch_ns = workers.fetch_ns + workers.collate_ns if workers is not None else 0.0
    times: dict[LineKey, float] = {}
    for line in profile.where:  # the most expensive first: its phase and text are shown
        key = key_of(line)
        if key is None:
            continue
        shown.setdefault(key, line)
        times[key] = times.get(key, 0.0) + line.share * (
            batch_ns if line.in_worker else profile.step_time_ns
        )
    return times


def _new_findings(ones: Sequence[Profile], others: Sequence[Profile], root: Path) -> list[NewFinding]:
    """Returns the faults that runs of the second side have and those of the first have not."""
    found: dict[str, list[Finding]] = {}
    for profile in others:
        for finding in profile.findings:
            found.setdefault(finding.rule, []).append(finding)
    new = []
    for rule, findings in found.items():
        had = sum(any(finding.rule == rule for finding in profile.findings) for profile in ones)
        before = (had, _asked(rule, ones))
        after = (len(findings), _asked(rule, others))
        if chance(before, after) > MAX_CHANCE:
            continue
        worst = max(findings, key=lambda finding: finding.lost_ns_per_step)
        new.append(
            NewFinding(
                rule=rule,
                summary=worst.summary,
                lost_ns=statistics.median(finding.lost_ns_per_step for finding in findings),
                file=relative(worst.file, root),
                line=worst.line,
                before=before,
                after=after,
            )
        )
    return sorted(new, key=lambda finding: -finding.lost_ns)


def _asked(rule: str, profiles: Sequence[Profile]) -> int:
    """Returns how many runs could answer: not asked, or abstained, is not the same as silent."""
    return sum(
        profile.num_rules is not None and rule not in {silent.rule for silent in profile.abstained}
        for profile in profiles
    )


def chance(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Returns how likely so many more of the second side's runs have it by chance: Fisher's exact test.

    Args:
        before: Runs of the first side that have it, and all of them.
        after: Likewise of the second side.
    """
    have, total = before[0] + after[0], before[1] + after[1]
    ways = math.comb(total, have)
    at_least = range(after[0], min(have, after[1]) + 1)
    return sum(math.comb(after[1], k) * math.comb(before[1], have - k) for k in at_least) / ways
