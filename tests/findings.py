"""What the rules find in a profile."""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.rules._engine import ask, rules

RULES = rules()


def found_in(example: Profile) -> dict[str, Finding]:
    return {finding.rule: finding for finding in ask(RULES, example)[0]}
