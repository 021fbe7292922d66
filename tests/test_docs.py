"""What the README and the pages of docs/ name is there: files, headings, commands, options, figures."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from benchmarks.readme import evidence, fill, interval, overhead
from diagnose.cli.main import add_commands, app
from tests.running import REPOSITORY

README = REPOSITORY / "README.md"
DOCS = REPOSITORY / "docs"
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "kernels/*.md", "examples/*.md", "benchmarks/*/*.md")
    for path in REPOSITORY.glob(pattern)
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"(?:^|[|;&(] ?|\b\w+=\S+ )diagnose ([a-z].*)")
ENDS = re.compile(r" -- | \\?\| | +#|; |(?<=\.py)(?: |$)|\\\|")
"""Where a call ends, or what it gives to the script begins."""
NAMED = re.compile(r"`((?:diagnose|kernels|dashboards|benchmarks|tests|examples|docs)/[\w/.-]+\.\w+)`")
INVENTED = {
    f"diagnose/{name}.py"
    for name in ("actions/flush_denormal", "hooks/weight_averaging", "rules/file_reopened")
}
"""What CONTRIBUTING.md adds for an example."""
CHANGES = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
MOST_WORDS = 1_400
"""The README is to be read in one sitting; what is longer belongs into docs/."""


def relative(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def anchors(page: Path) -> set[str]:
    """What a heading's link is called, as GitHub makes it."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue  # nobody asks the network here
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_that_are_named_are_there(page: Path) -> None:
    named = set(NAMED.findall(page.read_text(encoding="utf-8"))) - INVENTED
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []


def code(page: Path) -> Iterator[str]:
    """The lines of code of a page, and what stands in code within a line."""
    text = page.read_text(encoding="utf-8")
    yield from re.findall(r"^(?: {4,}|\$ )(.*)$", text, re.MULTILINE)
    yield from (line for block in FENCE.findall(text) for line in block.splitlines())
    yield from re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


@pytest.fixture(scope="module")
def verbs() -> dict[str, Any]:
    """Every command by its words, such as `baseline update`."""
    add_commands()
    found = {}
    group: Any = typer.main.get_command(app)
    for name, verb in group.commands.items():
        found[name] = verb
        found |= {f"{name} {inner}": command for inner, command in getattr(verb, "commands", {}).items()}
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != DOCS / "rules"], ids=relative)
def test_commands_and_options_are_those_of_the_program(page: Path, verbs: dict[str, Any]) -> None:
    unknown = []
    for call in (call for line in code(page) for call in CALL.findall(line)):
        words = ENDS.split(call)[0].split()
        two = " ".join(words[:2])
        name = two if two in verbs else words[0]
        if name not in verbs:
            unknown.append(call)
            continue
        parameters = verbs[name].params
        known = {
            "--help",
            *(option for each in parameters for option in (*each.opts, *each.secondary_opts)),
        }
        unknown += [
            f"{name} {word}"
            for word in words
            if word.startswith("--") and word.partition("=")[0] not in known
        ]
    assert unknown == []


def test_the_figures_of_the_readme_are_those_of_the_pages_that_they_come_from() -> None:
    text = README.read_text(encoding="utf-8")
    filled = fill(text, "evidence", evidence(DOCS))
    filled = fill(filled, "overhead", overhead(DOCS / "overhead-parts.md"))
    assert filled == text


@pytest.mark.parametrize(
    ("right", "cells", "wanted"),
    [(16, 18, (0.6529, 0.9862)), (0, 10, (0.0, 0.3085)), (10, 10, (0.6915, 1.0))],
)
def test_the_interval_of_a_rate_is_the_exact_one(
    right: int, cells: int, wanted: tuple[float, float]
) -> None:
    assert interval(right, cells) == pytest.approx(wanted, abs=1e-4)


def test_the_readme_can_be_read_in_one_sitting() -> None:
    assert len(README.read_text(encoding="utf-8").split()) <= MOST_WORDS


def test_every_page_of_docs_is_reached_from_the_readme() -> None:
    seen, asked = set(), [README]
    while asked:
        page = asked.pop()
        if page in seen:
            continue
        seen.add(page)
        links = re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
        asked += [(page.parent / link).resolve() for link in links if not link.startswith("http")]
    assert set(DOCS.glob("**/*.md")) - seen == set()


def test_the_changelog_has_the_parts_that_its_form_has_each_once() -> None:
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    for version in text.split("\n## ")[1:]:
        parts = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert parts == [part for part in CHANGES if part in parts], version.splitlines()[0]
