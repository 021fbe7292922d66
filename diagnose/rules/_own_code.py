"""Lines that are the loop's own business: no phase's, and no other rule's."""

from __future__ import annotations

import re

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._lines import MOSTLY, loop_lines, part_of
from diagnose.rules.slow_rollout import beside_acting
from diagnose.source.idioms import is_training

OTHERS_NAMES = """
    log sync synchronize collect wait save clip ema update metric schedule environment rollout whole
"""
OTHERS = frozenset(OTHERS_NAMES.split())
"""Idioms that rules of their own look after, and `whole`: what is done in one call already is no loop."""

PROFILER = "torch/profiler/"
"""What a line spends there is `profiler-left-on`'s."""

TRAINS = re.compile(
    r"\.backward\(|\.zero_grad\("
    r"|\bnext\((?!\(?([^()]|\([^()]*\))*\bfor\b)"  # `next(o for o in owners)` looks for something
    r"|(opt|optim|optimi[sz]er|sched\w*|scaler|engine|accelerator)s?\.step\(",
    re.IGNORECASE,
)
"""What a line with one of these spends beside a hooked call is the call's own edge."""


def is_own_code(line: SourceLine) -> bool:
    """Whether a line is the loop's own business: no phase's, no other rule's, no edge of a call, and no
    trainer's. What a hook of the optimizer does is, too, and one of a module that only notes numbers."""
    return (
        (line.phase is Phase.OTHER or "hook" in line.idiom)
        and not OTHERS & set(line.idiom)
        and not TRAINS.search(line.text)
        and not line.trains
        and not is_training(line.via)
        and not line.via.startswith(PROFILER)
    )


def own_lines(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines of the loop's own code, with what they take beside acting; the most expensive
    first."""
    return beside_acting(loop_lines(profile, is_own_code))


def irregular_lines(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines of the loop's own code that take their time in a few long steps at no regular
    interval, with what they take there; the most expensive first. What works on results of the model then
    is no metric of each step."""
    scoring = beside_acting(loop_lines(profile, scores_now_and_then))
    own = (line for line in own_lines(profile) if _is_irregular(line))
    found = [part_of(line, line.irregular) for line in (*own, *scoring)]
    return tuple(sorted(found, key=lambda line: -line.share))


def scores_now_and_then(line: SourceLine) -> bool:
    """Whether a line works on results of the model in a few long steps at no regular interval."""
    return OTHERS & set(line.idiom) == {"metric"} and _is_irregular(line)


def irregular_batches(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns likewise the lines that make batches between the hooks: what a loader waits for is none."""
    found = [
        part_of(line, line.irregular)
        for line in profile.where
        if line.phase is Phase.DATA_WAIT and not line.in_worker and not OTHERS & set(line.idiom)
        if _mostly_irregular(line)
    ]
    return tuple(sorted(found, key=lambda line: -line.share))


def regular_lines(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines of the loop's own code with what they take in usual steps, where `irregular_lines`
    has the rest; the most expensive first."""
    found = [
        part_of(line, line.share - line.irregular) if _is_irregular(line) else line
        for line in own_lines(profile)
    ]
    return tuple(sorted((line for line in found if line.share > 0), key=lambda line: -line.share))


def _is_irregular(line: SourceLine) -> bool:
    """Whether most of a line's time between the phases passes in long steps. What stands under a condition
    on the step's number comes regularly, whatever comes beside it."""
    return line.phase is Phase.OTHER and _mostly_irregular(line)


def _mostly_irregular(line: SourceLine) -> bool:
    return not line.every and line.irregular > MOSTLY * line.share
