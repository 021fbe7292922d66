"""Asks, in a process of its own, whether a rule of a running job misses what a deep window tells."""

from __future__ import annotations

from pathlib import Path

from diagnose.core.deep_window import TOLD


def answer(folder: str) -> list[str]:
    """Returns the names of the rules that abstain for want of what a window tells; see `tuner.question`."""
    from diagnose.analysis.profile import load_profile
    from diagnose.rules import diagnosed
    from diagnose.rules._engine import reading, rules

    profile = diagnosed(load_profile(Path(folder), alone=True))
    told = {name for name in TOLD if reading(profile, name) is None}
    known = rules()
    return [each.rule for each in profile.abstained if told.intersection(known[each.rule].needed(profile))]
