"""`diagnose rules`: the list, the page of a rule, and docs/rules."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from diagnose.cli.main import main
from diagnose.report import Terminal, rule_pages, rule_text, rules_text, write_pages
from diagnose.report._rule_facts import thresholds
from diagnose.report._rule_pages import MARK
from diagnose.report._terminal import display_width
from diagnose.rules import built_in
from tests.running import REPOSITORY

RULES = built_in()
DOCS = REPOSITORY / "docs" / "rules"


@pytest.fixture
def rules(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """`diagnose rules` with arguments; returns its exit code."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer puts its own there

    def call(*arguments: object) -> int:
        monkeypatch.setattr(sys, "argv", ["diagnose", "rules", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0)

    return call


def test_the_pages_in_docs_are_those_of_the_rules() -> None:
    written = {path.name: path.read_text(encoding="utf-8") for path in DOCS.glob("*.md")}
    pages = rule_pages(RULES)
    differing = sorted(name for name in {*written, *pages} if written.get(name) != pages.get(name))
    assert differing == [], "write them anew: python -m diagnose rules --write docs/rules"


@pytest.mark.parametrize("name", RULES)
def test_the_page_of_a_rule_shows_what_it_says_of_an_example(name: str) -> None:
    text = rule_text(name, RULES[name], Terminal(width=80))
    titles = ["What it means", "What to do", "When it is wrong", "An example"]
    titles[3:3] = ["Thresholds"] if thresholds(RULES[name]) else []
    places = [text.index(f"\n{title}\n") for title in titles]
    assert places == sorted(places)
    assert "\n    gain  " in text and "\n    To do: " in text


@pytest.mark.parametrize("width", [44, 80, 120])
def test_the_list_of_rules_fits_and_names_each_with_its_fault(width: int) -> None:
    text = rules_text(RULES, Terminal(width=width))
    words = " ".join(text.split())
    for name, rule in RULES.items():
        assert f"{name} {rule.title}" in words
    assert max(map(display_width, text.splitlines())) <= width


def test_thresholds_are_the_documented_numbers_of_the_rules_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY / "examples" / "own_rules")
    try:
        rule = importlib.import_module("team_rules.logging_stall").LoggingStall()
        assert [(number.name, number.value, number.reason) for number in thresholds(rule)] == [
            ("MIN_SHARE", "0.02", "Less of the step is not worth a change."),
            (
                "ERROR_SHARE",
                "0.3",
                "The sampler's share of a line is an estimate; this far off, generously.",
            ),
        ]
    finally:
        for name in ("team_rules", "team_rules.logging_stall"):
            sys.modules.pop(name, None)


def test_the_share_that_all_rules_have_in_common_is_told_of_those_that_use_it() -> None:
    def shared(name: str) -> list[tuple[str, str]]:
        numbers = thresholds(RULES[name])
        return [(number.value, number.reason) for number in numbers if number.name == "WORTH_SHARE"]

    reason = (
        "A fault that costs less of the step is not worth anybody's time, and near what noise can feign."
    )
    for name in ("recompilation", "missing-no-sync", "allocator-retries", "logging-io"):
        assert shared(name) == [("0.02", reason)]
    assert shared("gc-pauses") == [], "it has a reason of its own"


def test_numbers_that_have_one_reason_together_stand_in_one_row() -> None:
    values = {number.name: number.value for number in thresholds(RULES["launch-bound"])}
    assert values["LOW, EXPECTED, HIGH"] == "0.4, 0.8, 1.0"
    assert any(number.name.startswith("FUSED, ") for number in thresholds(RULES["unfused-attention"]))


def test_pages_of_rules_that_are_gone_are_removed_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text(f"{MARK}\n\n# gone\n")
    (tmp_path / "notes.md").write_text("# mine\n")
    assert write_pages(tmp_path, {"a.md": f"{MARK}\n"}) == ["a.md"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.md", "notes.md"]
    assert write_pages(tmp_path, {"a.md": f"{MARK}\n"}) == []


def test_rules_can_be_written_listed_and_asked_for_by_name(
    rules: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert rules("--write", tmp_path / "pages") == 0
    assert (tmp_path / "pages" / "index.md").is_file()
    capsys.readouterr()
    assert rules("--json", "-") == 0
    listed = json.loads(capsys.readouterr().out)["rules"]
    assert [rule["name"] for rule in listed] == list(RULES)
    name = listed[0]["name"]
    assert rules(name) == 0
    assert capsys.readouterr().out.startswith(f"{name}\n  {listed[0]['title']}")


def test_a_rule_that_is_not_there_ends_with_code_2_and_the_nearest_name(
    rules: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rules("serial-loadin") == 2
    assert capsys.readouterr().err == (
        "there is no rule 'serial-loadin'. Did you mean serial-loading?\nList them: diagnose rules\n"
    )
