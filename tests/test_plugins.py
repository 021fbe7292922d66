"""Plugins are found by looking into their folder."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from diagnose.core.plugins import discover

MakePackage = Callable[[dict[str, str]], ModuleType]

BASE = "class Greeting:\n    def words(self) -> str: ...\n"
HELLO = "from greetings.base import Greeting\nclass Hello(Greeting):\n    def words(self): return 'hello'\n"


@pytest.fixture
def greetings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePackage]:
    """Writes the files given into a package `greetings`, beside a `base.py`, and imports it."""
    folder = tmp_path / "greetings"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)

    def make(files: dict[str, str]) -> ModuleType:
        for name, source in {"__init__": "", "base": BASE, **files}.items():
            (folder / f"{name}.py").write_text(source, encoding="utf-8")
        return importlib.import_module("greetings")

    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "greetings"]:
        del sys.modules[name]


def base_of(package: ModuleType) -> type:
    base: type = importlib.import_module(f"{package.__name__}.base").Greeting
    return base


def test_each_file_holds_one_plugin_that_bears_its_name(greetings: MakePackage) -> None:
    package = greetings(
        {"good_day": HELLO.replace("hello", "good day"), "ahoy": HELLO.replace("hello", "ahoy")}
    )
    found = discover(package, base_of(package))
    assert [(name, plugin.words()) for name, plugin in found.items()] == [
        ("ahoy", "ahoy"),
        ("good-day", "good day"),
    ]


def test_a_file_with_an_underscore_is_not_even_imported(greetings: MakePackage) -> None:
    package = greetings({"hello": HELLO, "_shared": "raise AssertionError('imported')"})
    assert list(discover(package, base_of(package))) == ["hello"]


def test_a_plugin_imported_from_its_neighbour_counts_once(greetings: MakePackage) -> None:
    loud = "from greetings.hello import Hello\nclass Loud(Hello):\n    def words(self): return 'HELLO'\n"
    package = greetings({"hello": HELLO, "loud": loud})
    found = discover(package, base_of(package))
    assert [(name, plugin.words()) for name, plugin in found.items()] == [
        ("hello", "hello"),
        ("loud", "HELLO"),
    ]


def test_an_empty_folder_has_no_plugins(greetings: MakePackage) -> None:
    package = greetings({})
    assert discover(package, base_of(package)) == {}


@pytest.mark.parametrize(
    "source, message",
    [
        (HELLO + HELLO.replace("Hello", "Again"), "greetings.hello defines 2 Greetings, not one"),
        ("import greetings.base\n", "greetings.hello defines 0 Greetings, not one"),
    ],
    ids=["two", "none"],
)
def test_a_file_without_exactly_one_plugin_is_refused(
    greetings: MakePackage, source: str, message: str
) -> None:
    package = greetings({"hello": source})
    with pytest.raises(TypeError) as refused:
        discover(package, base_of(package))
    assert str(refused.value) == message
