"""The rules for a terminal: the list, and the page of one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from diagnose.report import _rule_facts as facts
from diagnose.report._json import SCHEMA
from diagnose.report._markdown import sections
from diagnose.report._terminal import Terminal
from diagnose.report._text import block_lines, wrapped
from diagnose.report.findings import card
from diagnose.rules import Rule

INDENT = "  "
MIN_TITLE_CELLS = 24  # beside names that leave less room than this, the title goes below
ITEM = re.compile(r"- ")


def rules_text(rules: Mapping[str, Rule], terminal: Terminal) -> str:
    """Prints every rule: its name, the fault, and the readings it cannot do without."""
    names = max(map(len, rules), default=0)
    margin = len(INDENT) + names + len(INDENT)
    below = terminal.width - margin < MIN_TITLE_CELLS
    indent = INDENT * 2 if below else " " * margin
    lines = [f"{len(rules)} rules; one in full: diagnose rules NAME", ""]
    for name, rule in rules.items():
        first = INDENT + terminal.paint(name, "bold") + " " * (margin - len(INDENT) - len(name))
        texts = wrapped(rule.title, terminal, indent)
        lines += [first.rstrip(), *texts] if below else [first + texts[0].lstrip(), *texts[1:]]
        if rule.needs:
            needs = wrapped(f"needs {', '.join(rule.needs)}", terminal, indent)
            lines += [terminal.paint(line, "dim") for line in needs]
    return "".join(f"{line}\n" for line in lines)


def rules_json(rules: Mapping[str, Rule]) -> dict[str, Any]:
    """Returns every rule as JSON."""
    return {
        "schema": SCHEMA,
        "rules": [
            {
                "name": name,
                "title": rule.title,
                "needs": list(rule.needs),
                "actions": list(rule.actions),
                "explains": list(rule.explains),
            }
            for name, rule in rules.items()
        ],
    }


def rule_text(name: str, rule: Rule, terminal: Terminal) -> str:
    """Prints the page of one rule, with its thresholds and an example of what it says."""
    lines = [terminal.paint(name, "bold"), *wrapped(f"{rule.title}.", terminal, INDENT)]
    for title, text in sections(rule.page):
        lines += ["", terminal.paint(title, "bold"), *_plain(text, terminal)]
    if rule.needs:
        lines += ["", terminal.paint("What it needs", "bold"), *(INDENT + need for need in rule.needs)]
    numbers = facts.thresholds(rule)
    if numbers:
        lines += ["", terminal.paint("Thresholds", "bold")]
        for number in numbers:
            lines.append(f"{INDENT}{number.name} = {number.value}")
            lines += wrapped(number.reason, terminal, INDENT * 2)
    shown = facts.example(rule)
    if shown is not None:
        words, finding, profile = shown
        lines += ["", terminal.paint("An example", "bold")]
        lines += [*wrapped(words, terminal, INDENT), ""]
        lines += block_lines(card(finding, profile), terminal)
    if rule.actions:
        actions = wrapped(", ".join(rule.actions), terminal, INDENT)
        lines += ["", terminal.paint("Actions that help", "bold"), *actions]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def _plain(markdown: str, terminal: Terminal) -> list[str]:
    """Prints the markdown of a page: paragraphs and lists filled anew, code and tables as they stand."""
    lines: list[str] = []
    for chunk in markdown.split("\n\n"):
        lines += [""] if lines else []
        if chunk.startswith(("    ", "```", "|")):
            lines += [INDENT + terminal.clean(line) for line in chunk.splitlines() if line[:3] != "```"]
            continue
        for item in re.split(r"\n(?=- )", chunk):
            is_item = ITEM.match(item) is not None
            lines += wrapped(" ".join(item.split()), terminal, INDENT * 2 if is_item else INDENT, INDENT)
    return lines
