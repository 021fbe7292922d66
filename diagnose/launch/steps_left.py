"""How many steps a script is still going to make, read off its loops as it is written.

`for epoch in range(args.epochs):` tells how far the loop is where its bounds can be looked up without
calling anything: numbers, names, attributes of plain objects, and sums and products of these.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import operator
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from diagnose.hooks._frames import USER, owner, value_of

WRAPPERS = ("enumerate", "tqdm")
"""Calls that go through their first argument."""

RANGES = ("range", "trange")

OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}

Loops = tuple[ast.For | ast.AsyncFor | ast.While, ...]


class Progress:
    """How far the script has come, asked now and then in its steps.

    A script may have several outermost loops, one after the other: the steps of those before tell nothing
    of how many the present one makes.
    """

    def __init__(self) -> None:
        self._loop: tuple[int, int] | None = None
        self._begun = (0, 0.0)
        self._done = 0.0

    def steps_left(self, frame: FrameType | None, steps: int, within: float | None) -> int | None:
        """Returns about how many steps there will be in the outermost loop; `None` where that is not known.

        Args:
            frame: The innermost frame.
            steps: How many there were so far.
            within: The part of its data that the innermost loop has gone through, if that is known.
        """
        loops = _loops(frame)
        done = _part_done(loops, within)
        if done is None or done > 1:
            return None
        user, loop = loops[0]
        known, self._loop = self._loop, (id(user), getattr(loop, "lineno", 0))
        if known is not None and (known != self._loop or done < self._done):
            self._begun = steps, done
        self._done = done
        since, part = steps - self._begun[0], done - self._begun[1]
        return round(since * (1 - done) / part) if since > 0 and part > 0 else None


def _loops(frame: FrameType | None) -> list[tuple[FrameType, ast.AST]]:
    """The loops of the user's that are under way, outermost first, each with its frame."""
    users = []
    while frame is not None:
        if owner(frame.f_code) == USER:
            users.append(frame)
        frame = frame.f_back
    return [(user, loop) for user in reversed(users) for loop in _loops_around(user)]


def _part_done(loops: list[tuple[FrameType, ast.AST]], within: float | None) -> float | None:
    """The part of the outermost loop that is done."""
    levels = [_level(*each) for each in loops]
    if not levels or levels[0] is None:
        return within if len(levels) == 1 else None
    done, size = 0.0, 1.0
    for level in levels:
        if level is None:
            return done + size * (within or 0.0)
        index, count = level
        size /= count
        done += index * size
    return done


def _loops_around(frame: FrameType) -> list[ast.AST]:
    """The loops of a frame's function that its present line is in, outermost first."""
    code = frame.f_code
    return [
        loop
        for loop in _loops_of(code.co_filename, code.co_name, code.co_firstlineno)
        if loop.lineno <= frame.f_lineno <= (loop.body[-1].end_lineno or 0)
    ]


@functools.lru_cache(maxsize=64)
def _loops_of(filename: str, name: str, first_line: int) -> Loops:
    """The loops of one function, each after those around it."""
    try:
        tree: ast.AST = ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return ()
    if name != "<module>":
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, kinds)
            and first_line in {node.lineno, *(each.lineno for each in node.decorator_list)}
        ]
        if not found:
            return ()
        tree = found[0]
    return tuple(_within(tree))


def _within(tree: ast.AST) -> Iterator[ast.For | ast.AsyncFor | ast.While]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            yield node
        yield from _within(node)


def _level(frame: FrameType, loop: ast.AST) -> tuple[int, int] | None:
    """Returns which of how many passes of a loop is under way."""
    if not isinstance(loop, ast.For):
        return None
    target, call = loop.target, loop.iter
    counted = _called(call) == "enumerate" and len(getattr(call, "args", ())) == 1
    if counted and isinstance(target, ast.Tuple) and target.elts:
        target = target.elts[0]
    while isinstance(call, ast.Call) and call.args and _called(call) in WRAPPERS:
        call = call.args[0]
    if not isinstance(target, ast.Name) or _called(call) not in RANGES:
        return None
    assert isinstance(call, ast.Call)
    bounds = [_value(frame, each) for each in call.args]
    now = _value(frame, target)
    if not all(type(each) is int for each in (*bounds, now)) or not 1 <= len(bounds) <= 3:
        return None
    passes = range(*bounds)
    if counted:
        passes = range(len(passes))
    return (passes.index(now), len(passes)) if now in passes else None


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


def _value(frame: FrameType, node: ast.AST) -> Any:
    """Looks a number up; runs no code of the script's, such as properties."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return value_of(frame, node.id)
    if isinstance(node, ast.Attribute):
        held = getattr(_value(frame, node.value), "__dict__", None)
        return held.get(node.attr) if isinstance(held, dict) else None
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        left, right = _value(frame, node.left), _value(frame, node.right)
        if type(left) is int and type(right) is int:
            with contextlib.suppress(ZeroDivisionError):
                return OPERATIONS[type(node.op)](left, right)
    return None
