"""Lines that are the loop's own business: no phase's, and no other rule's."""

from __future__ import annotations

import re
from dataclasses import replace

from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.rules._lines import MOSTLY, loop_lines
from diagnose.source.idioms import is_training

OTHERS_NAMES = """
    log sync synchronize collect wait save clip ema update metric schedule environment rollout whole
"""
OTHERS = frozenset(OTHERS_NAMES.split())
"""Idioms that rules of their own look after, and `whole`: what is done in one call already is no loop."""

TRAINS = re.compile(
    r"\.backward\(|\.zero_grad\(|\bnext\(|(opt|optim|optimi[sz]er|sched\w*|scaler|engine|accelerator)s?\.step\(",
    re.IGNORECASE,
)
"""What a line with one of these spends beside a hooked call is the call's own edge."""


def is_own_code(line: SourceLine) -> bool:
    """Whether a line is the loop's own business: no phase's, no other rule's, no edge of a call, and no
    trainer's. What a hook of the optimizer does is, too."""
    return (
        (line.phase is Phase.OTHER or "hook" in line.idiom)
        and not OTHERS & set(line.idiom)
        and not TRAINS.search(line.text)
        and not line.trains
        and not is_training(line.via)
    )


def irregular_lines(profile: Profile) -> tuple[SourceLine, ...]:
    """Returns the lines of the loop's own code that take their time in a few long steps at no regular
    interval, with what they take there; the most expensive first. What stands under a condition on the
    step's number comes regularly, whatever comes beside it."""
    lines = loop_lines(profile, lambda line: is_own_code(line) and line.phase is Phase.OTHER)
    found = [
        replace(
            line,
            share=line.irregular,
            num_samples=max(1, round(line.num_samples * line.irregular / line.share)),
        )
        for line in lines
        if not line.every and line.irregular > MOSTLY * line.share
    ]
    return tuple(sorted(found, key=lambda line: -line.share))


def regular_part(line: SourceLine) -> SourceLine:
    """Returns a line with what it takes in usual steps, where `irregular_lines` has the rest."""
    if line.every or line.irregular <= MOSTLY * line.share:
        return line
    part = line.share - line.irregular
    return replace(line, share=part, num_samples=max(1, round(line.num_samples * part / line.share)))
