"""In which order the statements of a function run, and which of them a value can come from."""

from __future__ import annotations

import ast
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence

from diagnose.source.kinds import Loop, Scope, Separate
from diagnose.source.reads_writes import rebinds
from diagnose.source.statements import all_lines, functions_of, header_lines, innermost_of

Block = tuple[int, str]
"""Statement and field of what runs or does not run as a whole: `(id(branch), "orelse")`."""


class Blocks:
    """Answers for one function, or the module, what runs before what."""

    def __init__(self, function: Scope) -> None:
        self._within: dict[int, tuple[Block, ...]] = {}
        self._loops: dict[int, tuple[Loop, ...]] = {}
        self._rebinds: defaultdict[tuple[str, tuple[Block, ...]], list[ast.stmt]] = defaultdict(list)
        self._rebound: set[str] = set()
        self._rebound_in: set[tuple[str, int]] = set()
        self._compound: dict[int, ast.stmt] = {}
        self._read(function.body, (), ())

    def loops(self, statement: ast.stmt) -> tuple[Loop, ...]:
        """Returns the loops around a statement, outermost first; a loop's head is inside of it."""
        return self._loops.get(id(statement), ())

    def reaches(self, writer: ast.stmt, name: str, reader: ast.stmt) -> bool:
        """Whether what a statement writes to a name may be what another one reads: in the same turn of a
        loop, or in a later one, where nothing in between surely gives the name another value.

        Args:
            writer: It writes to the name, or into what it holds.
            name: Dotted, it outlives the function.
            reader: It reads the name.
        """
        last, next_ = self._last_rebind(name, reader), self._next_rebind(name, writer)
        if writer.lineno < reader.lineno:
            kept = next_ is None or next_.lineno >= reader.lineno
            return writer is last or (kept and (last is None or writer.lineno > last.lineno))
        around = self._around_both(writer, reader)
        between = [each for each in (last, next_) if each is not None and each is not writer]
        if around:
            return all(around[-1] not in self.loops(each) for each in between)
        return "." in name and not between

    def is_given(self, name: str, reader: ast.stmt) -> bool:
        """Whether a name may have there what the function was given by it: nothing before surely gives it
        another value."""
        return self._last_rebind(name, reader) is None

    def outlives_turn(self, writer: ast.stmt, name: str, reader: ast.stmt) -> bool:
        """Whether what is put into a container may come out of it in a later turn of the loop around both:
        no turn begins with an empty one."""
        if name in {each for each, sure in rebinds(writer) if sure}:
            return False
        around = self._around_both(writer, reader)
        if not around:
            return "." in name and name not in self._rebound
        return (name, id(around[-1])) not in self._rebound_in

    def _around_both(self, writer: ast.stmt, reader: ast.stmt) -> list[Loop]:
        return [loop for loop in self.loops(writer) if loop in self.loops(reader)]

    def heads(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        """Yields the branches and loops that decide whether a statement runs."""
        for block, _ in self._within.get(id(statement), ()):
            if block in self._compound:
                yield self._compound[block]

    def _rebinds_around(self, name: str, statement: ast.stmt) -> Iterator[list[ast.stmt]]:
        """Yields, block by block, those that run whenever a statement does and then give a name another
        value, in the order of their lines; an entry goes with its container."""
        within = self._within.get(id(statement), ())
        for each in dict.fromkeys((name, name.partition("[")[0])):
            if each in self._rebound:
                for depth in range(len(within) + 1):
                    yield self._rebinds.get((each, within[:depth]), [])

    def _last_rebind(self, name: str, reader: ast.stmt) -> ast.stmt | None:
        """Returns the last statement before a reader, in its turn, after which a name surely has what that
        gave it."""
        last: ast.stmt | None = None
        for again in self._rebinds_around(name, reader):
            place = bisect_left(again, reader.lineno, key=_line)
            if place and (last is None or again[place - 1].lineno > last.lineno):
                last = again[bisect_left(again, again[place - 1].lineno, key=_line)]
        return last

    def _next_rebind(self, name: str, writer: ast.stmt) -> ast.stmt | None:
        """Returns the first statement after a writer, in its turn, that surely gives a name another one."""
        next_: ast.stmt | None = None
        for again in self._rebinds_around(name, writer):
            place = bisect_left(again, writer.lineno + 1, key=_line)
            if place < len(again) and (next_ is None or again[place].lineno < next_.lineno):
                next_ = again[place]
        return next_

    def _read(self, body: Iterable[ast.stmt], within: tuple[Block, ...], loops: tuple[Loop, ...]) -> None:
        for statement in body:
            if isinstance(statement, Separate):
                continue
            inside = (*loops, statement) if isinstance(statement, Loop) else loops
            self._within[id(statement)] = within
            self._compound[id(statement)] = statement
            self._loops[id(statement)] = inside
            for name, sure in rebinds(statement):
                if sure:
                    self._rebinds[name, within].append(statement)
                    self._rebound.add(name)
                    self._rebound_in.update((name, id(loop)) for loop in inside)
            runs_through = isinstance(statement, (ast.With, ast.AsyncWith, ast.Try))
            for field, value in ast.iter_fields(statement):
                if not isinstance(value, list):
                    continue
                block = within if runs_through and field != "orelse" else (*within, (id(statement), field))
                turns = inside if field == "body" else loops
                self._read([each for each in value if isinstance(each, ast.stmt)], block, turns)
                for each in value:
                    if isinstance(each, (ast.ExceptHandler, ast.match_case)):
                        self._read(each.body, (*within, (id(each), "body")), turns)


def _line(statement: ast.stmt) -> int:
    return statement.lineno


def lines_beside(tree: ast.Module, wanted: Collection[int]) -> set[int]:
    """Returns the lines that run whenever certain lines of their function do, and never without these: not
    what stands before `if step % 100: return`, or around a branch that they are in."""
    functions = list(functions_of(tree))
    found: set[int] = set()
    for index in {innermost_of(functions, line) for line in wanted}:
        found |= _beside(functions[index].body, wanted)[1]
    return found


def _beside(body: Sequence[ast.stmt], wanted: Collection[int]) -> tuple[bool, set[int]]:
    """Returns whether a block surely comes to a wanted line, and the lines that run with these."""
    begin, comes = 0, False
    lines: set[int] = set()
    for index, statement in enumerate(body):
        if not comes and _may_leave(statement):
            begin = index + 1
        inner = [_beside(block, wanted) for block in _blocks_of(statement)]
        lines = lines.union(*(found for _, found in inner))
        sure = all if isinstance(statement, (ast.If, ast.Match)) else any
        both = not isinstance(statement, ast.If) or bool(statement.orelse)
        comes = comes or bool(set(header_lines(statement)) & set(wanted))
        comes = comes or (bool(inner) and both and sure(each for each, _ in inner))
    if comes:
        for statement in body[begin:]:
            lines.update(all_lines(statement))
    return comes, lines


def _blocks_of(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    if isinstance(statement, Separate):
        return
    for name in ("body", "orelse", "finalbody"):
        if block := getattr(statement, name, None):
            yield block
    for case in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
        yield case.body


def _may_leave(statement: ast.stmt) -> bool:
    """Whether a branch ends the function, or the turn of the loop."""
    leaves = (ast.Return, ast.Continue, ast.Break)
    return isinstance(statement, ast.If) and any(isinstance(node, leaves) for node in ast.walk(statement))
