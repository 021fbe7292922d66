"""`diagnose actions`: the list, the page of an action, and docs/tuning.md."""

from __future__ import annotations

import pytest

from diagnose.report import Terminal
from diagnose.report._action_pages import (
    action_text,
    actions_json,
    actions_text,
    built_in_actions,
    title,
    tuning_page,
)
from diagnose.report._terminal import display_width
from diagnose.rules import built_in
from tests.running import REPOSITORY

ACTIONS = built_in_actions()
RULES = built_in()


def test_the_page_in_docs_is_that_of_the_actions() -> None:
    written = (REPOSITORY / "docs" / "tuning.md").read_text(encoding="utf-8")
    assert written == tuning_page(ACTIONS, RULES), "python -m diagnose actions --write docs/tuning.md"


@pytest.mark.parametrize("rule", RULES)
def test_every_action_that_a_rule_names_exists(rule: str) -> None:
    assert set(RULES[rule].actions) <= ACTIONS.keys()


@pytest.mark.parametrize("name", ACTIONS)
def test_the_page_of_an_action_fits_and_says_how_safe_it_is(name: str) -> None:
    text = action_text(name, ACTIONS[name], RULES, Terminal(width=80))
    assert " ".join(text.split()).startswith(f"{name}: {title(ACTIONS[name])}")
    assert "What it does" in text
    assert max(map(display_width, text.splitlines())) <= 80


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_list_of_actions_fits_and_names_each(width: int) -> None:
    text = actions_text(ACTIONS, Terminal(width=width))
    for name, action in ACTIONS.items():
        assert f"{name} " in text
        assert title(action).split()[0] in text
    assert max(map(display_width, text.splitlines())) <= width


def test_programs_get_the_rules_that_ask_for_each() -> None:
    listed = {each["name"]: each for each in actions_json(ACTIONS, RULES)["actions"]}
    assert "slow-optimizer" in listed["fused-optimizer"]["rules"]
