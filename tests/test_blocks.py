"""What statements read and write, and which value of a name reaches which of them."""

from __future__ import annotations

import ast
import sys

import pytest

from diagnose.source.blocks import Blocks
from diagnose.source.reads_writes import reads, writes
from diagnose.source.statements import statements_of


@pytest.mark.parametrize(
    ("statement", "written", "read"),
    [
        ("x += y", {"x"}, {"x", "y"}),
        ("x *= mask[0]", {"x"}, {"x", "mask"}),
        ("notes['a'] = y", {"notes[a]", "notes[*]"}, {"y"}),
        ("z = notes['a']", {"z"}, {"notes", "notes[a]"}),
        ("z = dict(notes)", {"z"}, {"dict", "notes"}),
        ("x.data.resize_(n).copy_(y)", {"x"}, {"x", "x.data", "x.data.resize_", "n", "y"}),
        ("nn.init.zeros_(w)", set(), {"nn", "nn.init", "nn.init.zeros_", "w"}),
        ("scaler.unscale_(opt)", set(), {"scaler", "scaler.unscale_", "opt"}),
        ("random.shuffle(self.rows)", {"self.rows"}, {"random", "random.shuffle", "self.rows"}),
        ("rows.sort(key=len)", {"rows"}, {"rows", "rows.sort", "len"}),
        ("z = rows.sort(key=len)", {"z"}, {"rows", "rows.sort", "len"}),
        ("torch.sort(rows)", set(), {"torch", "torch.sort", "rows"}),
        ("torch.take(rows, at, out=x)", {"x"}, {"torch", "torch.take", "rows", "at", "x"}),
    ],
)
def test_what_a_statement_reads_and_writes(statement: str, written: set[str], read: set[str]):
    (parsed,) = ast.parse(statement).body
    assert writes(parsed) == written
    assert {name for name in reads(parsed) if not name.endswith("[*]")} == read


ORDER = """
def f():
    x = first()
    for row in rows:
        a = use(x)  # begins
        if row:
            x = sometimes()
        x = always()
        with scope:
            x = inside()
        b = use(x)  # ends
        kept.append(x)
        turn = []
        turn.append(x)
    c = use(x)  # after
"""


@pytest.mark.parametrize(
    ("writer", "reader", "reaches"),
    [
        ("first()", "# begins", True),
        ("inside()", "# begins", True),
        ("sometimes()", "# begins", False),
        ("always()", "# ends", False),
        ("inside()", "# ends", True),
        ("first()", "# ends", False),
        ("inside()", "# after", True),
    ],
)
def test_a_value_reaches_what_reads_it_before_the_name_surely_has_another(writer, reader, reaches):
    (function,) = ast.parse(ORDER).body
    by_text = {ast.unparse(s): s for s in statements_of(function) if isinstance(s, ast.Assign)}
    lines = ORDER.splitlines()
    at = next(n for n, text in enumerate(lines, 1) if text.endswith(reader))
    (wrote,) = [s for text, s in by_text.items() if text.endswith(writer)]
    (read,) = [s for s in by_text.values() if s.lineno == at]
    assert Blocks(function).reaches(wrote, "x", read) is reaches


def test_what_is_put_into_a_container_stays_where_no_turn_empties_it():
    (function,) = ast.parse(ORDER).body
    appends = {ast.unparse(s): s for s in statements_of(function) if ".append" in ast.unparse(s)}
    blocks = Blocks(function)
    begins = next(s for s in statements_of(function) if ast.unparse(s) == "a = use(x)")
    assert blocks.outlives_turn(appends["kept.append(x)"], "kept", begins)
    assert not blocks.outlives_turn(appends["turn.append(x)"], "turn", begins)


def test_an_entry_goes_with_its_container():
    (function,) = ast.parse("def f():\n for _ in r:\n  d = next(it)\n  x = d['a']\n  d['a'] = save()").body
    taken, put = sorted(statements_of(function), key=lambda s: s.lineno)[2:]
    assert not Blocks(function).reaches(put, "d[a]", taken)


def test_what_reaches_what_is_answered_as_fast_however_often_a_name_is_given_a_value():
    def calls(num_lines: int) -> int:
        (function,) = ast.parse("def f(x):\n" + "    x = step(x)\n" * num_lines).body
        blocks, before, count = Blocks(function), sys.getprofile(), 0

        def counted(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            reaches = blocks.reaches(function.body[-2], "x", function.body[-1])
        finally:
            sys.setprofile(before)
        assert reaches
        return count

    assert calls(1024) < 2 * calls(64)
