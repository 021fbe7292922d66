"""Findings that rest on sampled source lines: which lines, what they take, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import ClassVar

from diagnose.core.finding import Finding
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.core.units import format_ms, format_share
from diagnose.rules.base import WORTH_SHARE, Rule
from diagnose.source.place import rarer

IN_LOOP = frozenset((Phase.COPY, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER))
"""Phases in which the loop's own lines are a fault of the loop. What a batch or an evaluation is made with
is for other rules."""

MIN_SAMPLES = 8
"""Fewer samples of a line may be chance."""

DEVIATIONS = 2.0
"""The bounds are so many standard deviations of the sampled count away: 95 %."""


MOSTLY = 0.5
"""Of a line's time."""

STRAGGLER = "compute-straggler"


def loop_lines(profile: Profile, wanted: Callable[[SourceLine], bool]) -> tuple[SourceLine, ...]:
    """Returns the lines of the loop, none of a worker's, that are wanted; the most expensive first."""
    return tuple(
        line for line in profile.where if not line.in_worker and line.phase in IN_LOOP and wanted(line)
    )


def doing(profile: Profile, idiom: str, *, beside: Collection[str] = ()) -> tuple[SourceLine, ...]:
    """Returns the lines of the loop with this idiom and none of `beside`."""
    return loop_lines(profile, lambda line: idiom in line.idiom and not set(beside) & set(line.idiom))


def updating(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines that update weights one by one beside an optimizer's step: in the loop, or in what
    hooks onto the step."""
    return tuple(
        line
        for line in profile.where
        if "update" in line.idiom and "whole" not in line.idiom and not line.in_worker
        if line.phase is Phase.OTHER or "hook" in line.idiom
    )


def waiting_share(profile: Profile) -> float:
    """Returns the part of the time in which lines of the script, none of a worker's, sleep or wait."""
    return sum(line.share for line in profile.where if "wait" in line.idiom and not line.in_worker)


def holding_up_batches(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines that wait where the loop makes a batch itself: what a loader waits for is the
    loader's, also where a thread takes its batches ahead of the loop."""
    if profile.input.asked_aside:
        return ()
    return tuple(
        line
        for line in profile.where
        if line.phase is Phase.DATA_WAIT and "wait" in line.idiom and not line.in_worker
        if line.between > MOSTLY * line.share
    )


def garbage_of(profile: Profile, idiom: str, lines: Sequence[SourceLine]) -> tuple[SourceLine, ...]:
    """Returns where such lines were interrupted by the garbage collector.

    It runs whenever so many objects have been made, so a line's part of its runs is the line's part of the
    objects. Where it takes longer than the lines themselves, it is what it walks that is to blame.
    """
    collecting = tuple(
        line
        for line in profile.where
        if line.phase is Phase.GC and not line.in_worker and idiom in line.idiom
    )
    if sum(line.share for line in collecting) > sum(line.share for line in lines):
        return ()
    return collecting


def share_of(lines: Sequence[SourceLine]) -> float:
    """Returns the part of the measured time that lines take; 0 while too few samples saw them."""
    if sum(line.num_samples for line in lines) < MIN_SAMPLES:
        return 0.0
    return sum(line.share for line in lines)


def part_of(line: SourceLine, share: float) -> SourceLine:
    """Returns a line with a part of what it takes, `share` of the measured time, and of its samples."""
    return replace(line, share=share, num_samples=max(1, round(line.num_samples * share / line.share)))


def lost_of(profile: Profile, lines: Sequence[SourceLine], part: float = 1.0) -> dict[Phase, float]:
    """Returns nanoseconds of the mean step by phase: this part of what the lines take there."""
    lost: dict[Phase, float] = {}
    for line in lines:
        lost[line.phase] = lost.get(line.phase, 0.0) + part * line.share * profile.step_time_ns
    return {phase: min(ns, profile.spent_ns(phase)) for phase, ns in lost.items()}


def bounds(lost: Mapping[Phase, float], lines: Sequence[SourceLine]) -> tuple[float, float]:
    """Returns the lower and upper 95 % bound of a time that was divided among lines by samples."""
    total = sum(lost.values())
    error = DEVIATIONS / math.sqrt(max(1, sum(line.num_samples for line in lines)))
    return total * max(0.0, 1 - error), total * (1 + error)


def is_first_alone(profile: Profile, lost: Mapping[Phase, float]) -> bool:
    """Whether no other rank does what the first one loses this time in: their phases are too short for as
    much. Where that cannot be told, it is not so."""
    others = profile.ranks[1:]
    if not others or profile.ranks_comparable is None:
        return False
    room_ns = (min(ns, median(rank.phase_time_ns.get(p, 0.0) for rank in others)) for p, ns in lost.items())
    return sum(room_ns) < MOSTLY * sum(lost.values())


def alone(profile: Profile, lost: Mapping[Phase, float]) -> tuple[str, ...]:
    """Says so as evidence where `is_first_alone`."""
    if not is_first_alone(profile, lost):
        return ()
    return (f"Rank {profile.ranks[0].rank} alone does this: that phase is far shorter on the others.",)


def explained_where_alone(explains: Sequence[str], finding: Finding, profile: Profile) -> tuple[str, ...]:
    """Returns what a finding of the first rank's lines explains: a late rank only if it alone has them.
    What all ranks do makes none of them late."""
    if is_first_alone(profile, finding.lost_ns):
        return tuple(explains)
    return tuple(name for name in explains if name != STRAGGLER)


def named(line: SourceLine) -> str:
    """Names a line for a sentence: `train.py:41 losses.append(loss.item())`."""
    text = f" {line.text}" if line.text else ""
    return f"{Path(line.file).name}:{line.line}{text}"


def seen_in(line: SourceLine) -> str:
    """Says what a line takes, to begin a sentence of the evidence with: `9 % of the time in train.py:41
    losses.append(loss.item()), main, about 90 samples`."""
    return (
        f"{format_share(line.share)} of the time in {named(line)}, {line.function}, about"
        f" {line.num_samples} samples"
    )


class LineRule(Rule):
    """A fault that is proved by what the sampled lines of the loop do.

    Attributes:
        idiom: What the lines do, as `SourceLine.idiom` has it.
        beside: Other idioms that make a line another rule's.
        what: The subject of the summary: `Logging`.
        least: The part of the lines' time that the fix wins at least, whatever it takes itself.
        assumption: What the estimate takes for granted.
        fix: What to do.
        code: A line to paste.
        fix_beside: What else to do where the line runs only every so many steps.
    """

    of_host = True
    idiom: ClassVar[str]
    beside: ClassVar[tuple[str, ...]] = ()
    what: ClassVar[str]
    least: ClassVar[float] = 1.0
    assumption: ClassVar[str]
    fix: ClassVar[str]
    code: ClassVar[str] = ""
    fix_beside: ClassVar[str] = ""

    def lines(self, profile: Profile) -> tuple[SourceLine, ...]:
        """Returns the lines that the fault is made of."""
        lines = doing(profile, self.idiom, beside=self.beside)
        return (*lines, *garbage_of(profile, self.idiom, lines))

    def applies(self, profile: Profile) -> bool:
        return bool(self.lines(profile))

    def remains_ns(self, profile: Profile, lines: Sequence[SourceLine]) -> float:
        """Returns nanoseconds of each step that the fix takes in the place of such lines."""
        return 0.0

    def cure(self, line: SourceLine) -> tuple[str, str]:
        """Returns what to do about the most expensive line, and a line to paste."""
        if not line.every or not self.code.startswith("if step %"):
            return self.fix, self.code
        again = rarer(line.every)
        return (
            f"It runs only where `{line.every}`, and takes this much all the same: do it a tenth as often."
            f" {self.fix_beside}".rstrip(),
            f"if {again}: ..." if again else "",
        )

    def explained(self, finding: Finding, profile: Profile) -> tuple[str, ...]:
        return explained_where_alone(self.explains, finding, profile)

    def check(self, profile: Profile) -> Finding | None:
        lines = self.lines(profile)
        share = share_of(lines)
        if share < WORTH_SHARE:
            return None
        lost = lost_of(profile, lines)
        low, high = bounds(lost, lines)
        spent_ns = sum(lost.values())
        won = max(self.least, 1 - self.remains_ns(profile, lines) / max(1.0, spent_ns))
        fix, code = self.cure(lines[0])
        return Finding(
            rule=self.name,
            summary=f"{self.what} takes {format_share(share)} of each step,"
            f" {format_ms(spent_ns)}, most of it in {named(lines[0])}",
            lost_ns={phase: won * ns for phase, ns in lost.items()},
            low_ns=self.least * low,
            high_ns=high,
            assumption=self.assumption,
            evidence=(
                *(
                    f"{format_share(line.share)} of the time in {named(line)}, {line.function}, phase"
                    f" {line.phase.label}, about {line.num_samples} samples."
                    for line in lines[:MAX_LINES]
                ),
                *alone(profile, lost),
            ),
            fix=fix,
            code=code,
            file=lines[0].file,
            line=lines[0].line,
            actions=self.actions,
        )


def under_trainer(profile: Profile) -> bool:
    """Whether the loop is that of Hugging Face's `Trainer`, which makes loader and optimizer itself."""
    return any(line.via.startswith("transformers/trainer") for line in profile.where)


MAX_LINES = 4
"""Lines named as evidence."""


def at(
    text: str, share: float, *idiom: str, phase: Phase = Phase.OTHER, in_worker: bool = False
) -> SourceLine:
    """Returns a sampled line for an example."""
    return SourceLine(
        phase=phase,
        file="/home/me/train.py",
        line=41,
        function="main",
        share=share,
        num_samples=round(1000 * share),
        in_worker=in_worker,
        text=text,
        idiom=idiom,
    )


def rhythm(profile: Profile, phase: Phase) -> str:
    """Says how often a phase comes and how long it takes: `, every 20 steps for 310 ms`."""
    each_ns, period = profile.series.each_ns(phase), profile.series.period.get(phase)
    if each_ns is None:
        return ""
    if period is None:
        return f", {format_ms(each_ns)} each time"
    return f", every {period} steps for {format_ms(each_ns)}"
