"""The rules as markdown: one page each, and an index. Written by `diagnose rules --write`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diagnose.core.errors import DiagnoseError
from diagnose.report import _rule_facts as facts
from diagnose.report._markdown import block_markdown, code, prose, sections
from diagnose.report.findings import card
from diagnose.rules import Rule

MARK = "<!-- written by: diagnose rules --write -->"
"""Opens every page; a file without it is never removed."""


def rule_pages(rules: Mapping[str, Rule]) -> dict[str, str]:
    """Returns the text of every page by file name."""
    pages = {f"{name}.md": rule_page(name, rule) for name, rule in rules.items()}
    return {**pages, "index.md": index_page(rules)}


def rule_page(name: str, rule: Rule) -> str:
    """Returns the page of one rule."""
    parts = [MARK, f"# {name}", f"{prose(rule.title)}."]
    for title, text in sections(rule.page):
        parts += [f"## {title}", text]
    if rule.needs:
        needed = ", ".join(map(code, rule.needs))
        parts += ["## What it needs", f"The readings {needed}; where one was not taken, it abstains."]
    numbers = facts.thresholds(rule)
    if numbers:
        rows = [f"| {code(number.name)} | {number.value} | {prose(number.reason)} |" for number in numbers]
        parts += ["## Thresholds", "\n".join(["| name | value | why |", "|---|---|---|", *rows])]
    shown = facts.example(rule)
    if shown is not None:
        words, finding, profile = shown
        parts += ["## An example", words, block_markdown(card(finding, profile))]
    if rule.actions:
        parts += ["## Actions that help", ", ".join(map(code, rule.actions))]
    return "\n\n".join(parts) + "\n"


def index_page(rules: Mapping[str, Rule]) -> str:
    """Returns the table of all rules."""
    rows = [
        f"| [{name}]({name}.md) | {prose(rule.title)} | {', '.join(map(code, rule.needs))} |"
        for name, rule in rules.items()
    ]
    return (
        "\n\n".join(
            [
                MARK,
                "# Rules",
                "One page per fault that `diagnose` knows; `diagnose rules NAME` prints it.",
                "\n".join(["| rule | fault | readings it needs |", "|---|---|---|", *rows]),
            ]
        )
        + "\n"
    )


def write_pages(folder: Path, pages: Mapping[str, str]) -> list[str]:
    """Writes pages into a folder, and removes those written earlier of rules that are gone.

    Returns:
        Names of the files that were not there, or said something else.

    Raises:
        DiagnoseError: If the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
        for name in there.keys() - pages.keys():
            if there[name].startswith(MARK):
                (folder / name).unlink()
        changed = [name for name, text in pages.items() if there.get(name) != text]
        for name in changed:
            (folder / name).write_text(pages[name], encoding="utf-8")
    except OSError as error:
        raise DiagnoseError(f"diagnose: cannot write {folder}: {error.strerror}.") from error
    return changed
