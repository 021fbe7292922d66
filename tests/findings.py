"""What the rules find in a profile."""

from __future__ import annotations

from diagnose.core.finding import Finding
from diagnose.core.profile import Profile
from diagnose.rules._engine import ask, rules

RULES = rules()
INPUT = (
    "bursty-prefetch",
    "cache-thrash",
    "cold-page-cache",
    "epoch-boundary-stall",
    "repeated-preparation",
    "serial-loading",
    "slow-collate",
    "slow-pinning",
    "slow-samples",
    "slow-storage",
    "slow-transform",
    "too-few-workers",
    "too-many-workers",
    "worker-imbalance",
    "worker-memory-growth",
    "worker-startup",
    "worker-transfer",
)
"""The rules of the input pipeline."""


def found_in(example: Profile) -> dict[str, Finding]:
    """Asks all rules; returns what each found, by its name."""
    return {finding.rule: finding for finding in ask(RULES, example)[0]}


def first(found: Profile) -> Finding:
    """Returns the first finding of a profile that was diagnosed."""
    assert found.findings, found.abstained
    return found.findings[0]
