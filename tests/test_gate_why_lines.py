"""Which lines a loss is attributed to: matched across two versions of a file, and named if they grew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from diagnose.core.input import InputStats, WorkerStats
from diagnose.core.phases import Phase
from diagnose.core.profile import Profile, SourceLine
from diagnose.gate.attribution import Runs, attribute
from diagnose.gate.matching import match_texts
from diagnose.gate.result import Metric
from diagnose.gate.worktrees import renamed_files
from tests.attributed import AFTER, BEFORE, MS, attributed, pairs_of, version
from tests.gates import commit, git, repository


def test_lines_are_matched_across_what_was_inserted_and_edited() -> None:
    match = match_texts(BEFORE, AFTER)
    assert match.after_of == {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 10, 8: 11}
    assert [line for line in range(1, 12) if match.in_diff(line)] == [7, 8, 9, 10]


def test_a_function_that_was_moved_is_the_same_one_and_in_the_diff() -> None:
    load = "def load(index):\n    return decode(index)\n\n"
    match = match_texts(BEFORE, BEFORE.replace(load, "") + "\n" + load)
    assert {line: match.after_of[line] for line in (3, 4, 6, 7, 8)} == {3: 7, 4: 8, 6: 3, 7: 4, 8: 5}
    assert [line for line in (4, 5, 7, 8) if match.in_diff(line)] == [7, 8]


def test_a_line_that_is_gone_is_not_taken_for_a_short_one_or_one_of_several() -> None:
    old = "def f():\n    loss.backward()\n    continue\n\n\nx = 1\ny = 2\n"
    for added in ("loss.backward()\nloss.backward()\n", "continue\n"):
        after_of = match_texts(old, "x = 1\ny = 2\n\na()\n" + added).after_of
        assert {1, 2, 3}.isdisjoint(after_of)


def test_a_line_of_a_renamed_file_is_compared_with_itself(tmp_path: Path) -> None:
    """And a renamed file is not new from its first line to its last."""
    top = repository(tmp_path / "repo", BEFORE)
    git(top, "mv", "train.py", "net.py")
    commit(top, AFTER.replace("slow=True", "slow=3"), path="net.py")
    hashes = [git(top, "rev-parse", name) for name in ("HEAD~1", "HEAD")]
    renamed = renamed_files(top, *hashes)
    assert renamed == {"train.py": "net.py"}
    before, after = pairs_of(6, forward=10.0)
    base, head = tmp_path / "base", tmp_path / "head"
    before = [version(base, BEFORE, {(7, "step"): 24.0, (8, "step"): 40.0}, run) for run in before]
    after = [version(head, AFTER, {(10, "step"): 34.0, (11, "step"): 40.0}, run) for run in after]
    (head / "train.py").rename(head / "net.py")
    after = [
        replace(run, where=tuple(replace(line, file=str(head / "net.py")) for line in run.where))
        for run in after
    ]
    sides = (
        Runs(root=base, profiles=tuple(before)),
        Runs(root=head, profiles=tuple(after), renamed=renamed),
    )
    why = attribute(*sides, Metric.SAMPLES_PER_S)
    assert [(each.file, each.line, each.in_diff) for each in why.lines] == [("net.py", 10, True)]
    assert why.lines[0].growth.ns == pytest.approx(10 * MS)
    assert [each.line for each in why.hot_diff] == [10]


def test_a_statement_over_several_lines_is_in_the_diff_as_a_whole() -> None:
    match = match_texts("f(\n    1,\n    2,\n)\ng()\n", "f(\n    1,\n    3,\n)\ng()\n")
    assert [line for line in range(1, 6) if match.in_diff(line)] == [1, 2, 3, 4]


@pytest.mark.parametrize("text", ["def (:\n", "\0", ""], ids=["not Python", "a null", "empty"])
def test_any_text_can_be_matched(text: str) -> None:
    assert match_texts(text, text).changed == frozenset()
    assert match_texts(None, text).after_of == {}
    assert match_texts(text, None).after_of == {}


def test_lines_are_counted_as_python_counts_them() -> None:
    """A form feed, by which some divide a file into pages, does not end a line."""
    text = "import x\n\x0c\ndef f():\n    a = '\x85\u2028'\n    b = 2\n"
    assert match_texts(text, text.replace("2\n", "3\n")).changed == {5}


def test_the_line_that_grew_is_named_where_it_stands_now(tmp_path: Path) -> None:
    before, after = pairs_of(6, forward=10.0)
    base, head = tmp_path / "base", tmp_path / "head"
    before = [version(base, BEFORE, {(7, "step"): 24.0, (8, "step"): 40.0}, run) for run in before]
    after = [version(head, AFTER, {(10, "step"): 34.0, (11, "step"): 40.0}, run) for run in after]
    why = attributed(before, after, base, head)
    assert [(each.file, each.line, each.in_diff) for each in why.lines] == [("train.py", 10, True)]
    assert why.lines[0].growth.ns == pytest.approx(10 * MS)
    assert [each.line for each in why.hot_diff] == [10]


def test_a_changed_line_that_certainly_did_not_grow_is_left_out(tmp_path: Path) -> None:
    before, after = pairs_of(6, forward=10.0)
    base, head = tmp_path / "base", tmp_path / "head"
    before = [version(base, BEFORE, {(7, "step"): 24.0, (8, "step"): 40.0}, run) for run in before]
    after = [version(head, AFTER, {(10, "step"): 20.0, (11, "step"): 40.0}, run) for run in after]
    why = attributed(before, after, base, head)
    assert why.hot_diff == ()


def test_a_new_line_grew_from_nothing_and_a_deleted_one_does_not_hide_it(tmp_path: Path) -> None:
    before, after = pairs_of(7, forward=10.0)
    base, head = tmp_path / "base", tmp_path / "head"
    old = BEFORE.replace("    loss = model", "    print('hello', 1, 2, 3)\n    loss = model")
    before = [version(base, old, {(7, "step"): 5.0, (8, "step"): 24.0}, run) for run in before]
    after = [version(head, AFTER, {(7, "step"): 10.0, (10, "step"): 24.0}, run) for run in after]
    why = attributed(before, after, base, head)
    assert [(each.line, each.growth.before_ns, each.idiom) for each in why.lines] == [(7, 0.0, ("sync",))]


def test_a_line_that_stands_now_where_another_was_deleted_is_compared_with_itself(tmp_path: Path) -> None:
    before, after = pairs_of(7, forward=10.0)
    base, head = tmp_path / "base", tmp_path / "head"
    old = BEFORE.replace("    loss = model", "    print('hello', 1, 2, 3)\n    loss = model")
    before = [
        version(base, old, {(7, "step"): 5.0, (8, "step"): 24.0, (9, "step"): 9.0}, run) for run in before
    ]
    after = [version(head, BEFORE, {(7, "step"): 24.0, (8, "step"): 19.0}, run) for run in after]
    why = attributed(before, after, base, head)
    assert [(each.line, round(each.growth.before_ns / MS)) for each in why.lines] == [(8, 9)]


def test_a_line_of_the_workers_is_compared_by_the_time_of_a_batch(tmp_path: Path) -> None:
    def with_workers(run: Profile, root: Path, fetch_ms: float, share: float) -> Profile:
        line = SourceLine(
            phase=Phase.DATA_WAIT,
            file=str(root / "data.py"),
            line=2,
            function="get",
            share=share,
            in_worker=True,
        )
        workers = WorkerStats(
            num_workers=2,
            batches=9,
            fetch_ns=fetch_ms * MS,
            collate_ns=0.0,
            send_ns=0.0,
            cpu_share=1.0,
            idle_share=0.0,
        )
        return replace(run, where=(line,), input=InputStats(workers=workers))

    before, after = pairs_of(8, data_wait=10.0)
    before = [with_workers(run, tmp_path, 40.0, 0.5) for run in before]
    after = [with_workers(run, tmp_path, 80.0, 0.75) for run in after]
    (line,) = attributed(before, after, tmp_path, tmp_path).lines
    assert (line.in_worker, line.growth.before_ns, line.after_ns) == (True, 20 * MS, 60 * MS)
