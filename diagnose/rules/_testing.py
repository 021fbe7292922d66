"""What every rule is held to, the built-in ones and those of other packages alike.

`check_rule(MyRule())` in a test is enough; the single demands are functions of their own, so that a test
per example can be made of them. Each raises an `AssertionError` that says what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from diagnose.core.profile import Profile
from diagnose.rules._engine import ask, reading
from diagnose.rules._examples import profile
from diagnose.rules.base import Rule

SECTIONS = ("## What it means", "## What to do", "## When it is wrong")

MIN_SILENT = 2
"""A healthy run, and the nearest neighbour of the fault."""

TITLE_LENGTH = range(11, 80)
"""Characters of a title: a sentence, and one line of a table."""

HEALTHY_STEPS_MS = (1, 100, 1000)
ROUNDING = 1 + 1e-9


def check_rule(rule: Rule, others: Collection[str] | None = None) -> None:
    """Holds a rule to everything below.

    Args:
        rule: The rule.
        others: Names of all other rules, where `explains` is to be checked.

    Raises:
        AssertionError: At the first demand that the rule does not meet.
    """
    is_documented(rule)
    for example in rule.fires_on:
        fires(rule, example)
        has_its_readings(rule, example)
    for example in rule.silent_on:
        is_silent(rule, example)
    for step_ms in HEALTHY_STEPS_MS:
        is_silent(rule, profile(step_ms=step_ms))
    if others is not None:
        unknown = set(rule.explains) - (set(others) - {rule.name})
        _demand(not unknown, f"{rule.name} explains rules that do not exist: {sorted(unknown)}")


def is_documented(rule: Rule) -> None:
    """The rule has a title, a page with its three sections, and examples of both kinds."""
    found = tuple(re.findall(r"^## .*$", rule.page, re.MULTILINE))
    _demand(found == SECTIONS, f"{rule.name}: its page has the sections {found}, not {SECTIONS}")
    _demand(len(rule.title) in TITLE_LENGTH, f"{rule.name}: a title of {len(rule.title)} characters")
    _demand(bool(rule.fires_on), f"{rule.name} has no profile that it fires on")
    _demand(
        len(rule.silent_on) >= MIN_SILENT,
        f"{rule.name} needs {MIN_SILENT} profiles that it is silent on: a healthy one and a neighbour",
    )


def fires(rule: Rule, example: Profile) -> None:
    """The rule finds its fault in the example, with all that a reader needs."""
    findings, abstained = ask({rule.name: rule}, example)
    _demand(not abstained, f"{rule.name} abstains from its own example: {abstained}")
    _demand(len(findings) == 1, f"{rule.name} does not fire on its own example")
    (finding,) = findings
    for name in ("summary", "evidence", "fix", "assumption"):
        _demand(bool(getattr(finding, name)), f"{rule.name}: its finding has no {name}")
    unknown = set(finding.actions) - set(rule.actions)
    _demand(not unknown, f"{rule.name}: its finding names actions that its class does not: {unknown}")
    _demand(
        0 < finding.lost_ns_per_step <= example.step_time_ns * ROUNDING,
        f"{rule.name}: {finding.lost_ns_per_step} ns lost of a step of {example.step_time_ns}",
    )
    for phase, lost_ns in finding.lost_ns.items():
        there = example.phase_time_ns[phase]
        _demand(
            lost_ns <= there * ROUNDING, f"{rule.name}: {lost_ns} ns lost of {there} ns of {phase.label}"
        )
    gain = finding.gain(example.step_time_ns)
    _demand(1 <= gain.low <= gain.speedup <= gain.high, f"{rule.name}: not an interval: {gain}")


def has_its_readings(rule: Rule, example: Profile) -> None:
    """Every reading that the rule needs is in its example; a path that leads nowhere would never be."""
    for need in rule.needed(example):
        _demand(reading(example, need) is not None, f"{rule.name} needs {need}, which its example lacks")


def is_silent(rule: Rule, example: Profile) -> None:
    """The rule finds nothing in the example."""
    findings, _ = ask({rule.name: rule}, example)
    _demand(not findings, f"{rule.name} fires where its fault is not: {findings}")


def _demand(met: bool, otherwise: str) -> None:
    if not met:
        raise AssertionError(otherwise)
