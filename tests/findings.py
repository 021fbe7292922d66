"""What the rules find in a profile, and profiles of runs that nobody disturbed."""

from __future__ import annotations

from collections.abc import Callable

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

MAX_FOREIGN_CPUS = 0.2
MAX_RUNS = 3


def found_in(example: Profile) -> dict[str, Finding]:
    """Asks all rules; returns what each found, by its name."""
    return {finding.rule: finding for finding in ask(RULES, example)[0]}


def first(found: Profile) -> Finding:
    """Returns the first finding of a profile that was diagnosed."""
    assert found.findings, found.abstained
    return found.findings[0]


def undisturbed(measured: Callable[[str], Profile]) -> Profile:
    """Returns the profile of a run beside which others took no CPUs, or of the last of a few.

    Args:
        measured: Makes a run of a name.
    """
    for number in range(MAX_RUNS):
        profile = measured(f"run{number}")
        if (profile.foreign_cpus or 0.0) <= MAX_FOREIGN_CPUS:
            break
    return profile
