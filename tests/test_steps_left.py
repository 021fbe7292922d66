"""How far a script is in its loops, read off the script."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diagnose.hooks._frames import value_of
from diagnose.launch import steps_left as module
from diagnose.launch.steps_left import Progress, _loops, _part_done


@pytest.fixture(autouse=True)
def only_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runner has loops, too."""
    monkeypatch.setattr(module, "owner", lambda code: code.co_filename.endswith("job.py") * module.USER)
    assert module.USER


class Box:
    """Has a property, which is code of the script's."""

    asked = 0

    @property
    def limit(self) -> int:
        Box.asked += 1
        return 4


def told(tmp_path: Path, source: str, within: float | None = None, **names: Any) -> list[float | None]:
    """Runs a script that calls `look()`; returns what was seen each time."""
    path, seen = tmp_path / "job.py", []
    path.write_text(source, encoding="utf-8")

    def look() -> None:
        seen.append(_part_done(_loops(sys._getframe(1)), within))

    exec(compile(source, str(path), "exec"), {"look": look, "__name__": "job", **names})
    return seen


def test_a_loop_over_epochs_tells_how_far_it_is(tmp_path):
    assert told(tmp_path, "for epoch in range(4):\n    look()\n") == [0, 0.25, 0.5, 0.75]


def test_a_loop_within_it_tells_more(tmp_path):
    source = "for epoch in range(2):\n    for step in range(0, 4, 2):\n        look()\n"
    assert told(tmp_path, source) == [0, 0.25, 0.5, 0.75]


def test_the_data_within_an_epoch_count_where_it_is_known_how_many_there_are(tmp_path):
    source = "for epoch in range(2):\n    for batch in 'ab':\n        look()\n"
    assert told(tmp_path, source) == [0, 0, 0.5, 0.5]
    assert told(tmp_path, source, within=0.5) == [0.25, 0.25, 0.75, 0.75]


def test_a_single_pass_over_the_data_is_as_far_as_the_data(tmp_path):
    assert told(tmp_path, "for batch in 'a':\n    look()\n", within=0.3) == [0.3]


def test_an_epoch_may_be_a_function_and_its_number_an_attribute(tmp_path):
    source = """
def train(args):
    for batch in "a":
        look()

def main(args):
    for epoch, _ in enumerate(tqdm(range(args.start, args.epochs * 2 + 1))):
        train(args)

main(args)
"""
    args = SimpleNamespace(start=1, epochs=2)
    assert told(tmp_path, source, args=args, tqdm=lambda each: each) == [0, 0.25, 0.5, 0.75]


def test_looking_at_a_functions_names_keeps_nothing_of_it_alive(tmp_path):
    source = """
import weakref

class Graph: ...

def main():
    graph = Graph()
    gone = weakref.ref(graph)
    for epoch in range(2):
        look()
        graph = None
        assert gone() is None

main()
"""
    assert told(tmp_path, source) == [0, 0.5]


def test_a_function_that_uses_its_names_as_a_dictionary_keeps_it_as_it_is(tmp_path):
    source = """
def main():
    given = locals()
    for epoch in range(2):
        look()
    assert given == {}

main()
"""
    told(tmp_path, source)


@pytest.mark.parametrize(
    "loop",
    [
        "while count:",
        "for epoch in epochs():",
        "for epoch in range(limit()):",
        "for epoch in range(Box.limit.fget(box)):",
        "for epoch in range(box.limit):",
        "for epoch in range('a' and 4):",
        "for epoch in itertools.count():",
    ],
)
def test_what_can_only_be_found_out_by_running_code_is_not_known(tmp_path, loop):
    source = f"import itertools\ncount = 2\n{loop}\n    count -= 1\n    look()\n    if not count: break\n"
    names: dict[str, Callable[[], Any]] = {"epochs": lambda: [1, 2], "limit": lambda: 4}
    Box.asked = 0
    assert told(tmp_path, source, Box=Box, box=Box(), **names) == [None, None]
    assert Box.asked == loop.count("limit") * loop.count("box"), "by the script itself"


def test_code_without_a_source_tells_nothing():
    seen: list[float | None] = []
    names = {"look": lambda: seen.append(_part_done(_loops(sys._getframe(1)), None))}
    exec(compile("for epoch in range(2):\n    look()\n", "nowhere/job.py", "exec"), names)
    assert seen == [None, None]


def test_steps_go_on_as_they_came(tmp_path):
    path, seen, progress = tmp_path / "job.py", [], Progress()
    source = "for epoch in range(4):\n    look(epoch)\n"
    path.write_text(source, encoding="utf-8")

    def look(epoch: int) -> None:
        seen.append(progress.steps_left(sys._getframe(1), 100 * epoch, None))

    exec(compile(source, str(path), "exec"), {"look": look})
    assert seen == [None, 300, 200, 100], "at the very beginning nothing is known"


@pytest.mark.parametrize(
    "source",
    [
        "for step in range(5000):\n    look()\nfor step in range(500):\n    look()\n",
        "def train(steps):\n    for step in range(steps):\n        look()\n\ntrain(5000)\ntrain(500)\n",
    ],
)
def test_steps_of_a_loop_before_are_none_of_the_present_ones(tmp_path, source):
    path, seen, progress, steps = tmp_path / "job.py", {}, Progress(), 0
    path.write_text(source, encoding="utf-8")

    def look() -> None:
        nonlocal steps
        if steps in (1000, 5020, 5050, 5400):
            seen[steps] = progress.steps_left(sys._getframe(1), steps, None)
        steps += 1

    exec(compile(source, str(path), "exec"), {"look": look})
    assert seen == {1000: 4000, 5020: None, 5050: 450, 5400: 100}


class Loop:
    def run(self, ask: Callable[[], Any]) -> tuple[Any, Any]:
        held = Kept()
        gone, found = weakref.ref(held), ask()
        del held
        gc.collect()
        return found, gone()


class Kept:
    pass


def test_looking_a_name_up_in_a_running_function_keeps_nothing_of_what_that_holds():
    loop = Loop()
    assert loop.run(lambda: value_of(sys._getframe(1), "self")) == (loop, None)
    assert loop.run(lambda: value_of(sys._getframe(1), "found")) == (None, None)
