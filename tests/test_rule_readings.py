"""What rules read of a profile is made by what measures: a rule that reads anything else cannot fire."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pytest

from diagnose import core
from diagnose.rules._engine import ask, built_in
from diagnose.rules.base import Rule
from tests.running import REPOSITORY

MAKERS = ("hooks", "launch", "analysis", "store", "tuner")
"""Folders that make the nouns of a profile, or the facts that these are made of."""

MADE_BY_RULES = {"finding"}

Field = tuple[str, str]


def nouns() -> dict[str, type]:
    """The dataclasses of `core` that rules are given, by name."""
    names = {each.name for each in pkgutil.iter_modules(core.__path__)} - MADE_BY_RULES
    modules = [importlib.import_module(f"{core.__name__}.{name}") for name in sorted(names)]
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    return {
        kind.__name__: kind
        for kind in classes
        if is_dataclass(kind) and kind.__module__.rpartition(".")[2] not in MADE_BY_RULES
    }


NOUNS = nouns()


@cache
def written() -> frozenset[Field]:
    """The fields that are made somewhere: arguments of the class or of `replace`; in files that name the
    class, as those which make its facts, strings and the arguments of other calls, too."""
    found: set[Field] = set()
    for folder in MAKERS:
        for path in (REPOSITORY / "diagnose" / folder).rglob("*.py"):
            text = path.read_text()
            named = NOUNS.keys() & set(re.findall(r"\w+", text))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Call):
                    callee = ast.unparse(node.func).rpartition(".")[2]
                    owners = {callee} if callee in NOUNS else NOUNS if callee == "replace" else named
                    found |= {
                        (owner, given.arg) for owner in owners for given in node.keywords if given.arg
                    }
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found |= {(owner, node.value) for owner in named}
    return frozenset(found)


def read(rules: Mapping[str, Rule]) -> dict[Field, set[str]]:
    """The fields that each rule asks for in its own examples, and the rules' names."""
    asked: dict[Field, set[str]] = {}
    asking = ""

    def noted(kind: type, known: frozenset[str]) -> Any:
        def get(noun: Any, name: str) -> Any:
            if name in known and asking:
                asked.setdefault((kind.__name__, name), set()).add(asking)
            return object.__getattribute__(noun, name)

        return get

    with pytest.MonkeyPatch.context() as patch:
        for kind in NOUNS.values():
            known = frozenset(each.name for each in fields(kind))
            patch.setattr(kind, "__getattribute__", noted(kind, known), raising=False)
        for name, rule in rules.items():
            for example in (*rule.fires_on, *rule.silent_on):
                asking = name
                ask({name: rule}, example)
                asking = ""
    return asked


def unmade(rules: Mapping[str, Rule], made: Iterable[Field]) -> dict[str, set[str]]:
    """The fields that rules read and nothing makes, with the names of these rules."""
    known = set(made)
    return {".".join(field): names for field, names in read(rules).items() if field not in known}


def test_a_rule_reads_nothing_that_nothing_measures():
    assert unmade(built_in(), written()) == {}


def test_a_rule_that_reads_what_nothing_measures_is_named():
    made = written() - {("Fsdp", "regather_ns")}
    assert unmade(built_in(), made) == {"Fsdp.regather_ns": {"oversharded"}}
