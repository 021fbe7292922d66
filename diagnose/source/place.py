"""A statement and what surrounds it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from diagnose.source.calling import TRAINS, is_call
from diagnose.source.kinds import Function, Loop, Separate
from diagnose.source.names import names_in
from diagnose.source.statements import is_operation


@dataclass(frozen=True, slots=True)
class Place:
    """A statement and what surrounds it.

    Attributes:
        statement: It.
        loops: Those around it in its function, innermost first.
        function: That function.
        every: The innermost condition there with a remainder in it: `step % 10 == 0`.
        weights: Names that hold a model's weights there.
        gradients: Names that hold their gradients.
        norms: Names that are made of norms of gradients there.
        hooked: The parameter of that function, if a hook of each weight calls it.
        turned: Those of its parameters that loops give one weight, or gradient, after the other.
        helpers: What functions of the file do that loops give one weight after the other, by name.
        rates: Names there whose values become a learning rate.
        groups: Names there that hold an optimizer's groups of parameters, or one of them.
        given_rates: What the statement gives to a function that sets it as a rate: `set_lr(optimizer, lr)`.
        at_once: Names of the file that hold an average which is updated in one call for all tensors.
        saved: Names there of files that state is saved to, and of what is made for them.
        texts: Names there of text that is made to be written to a file.
        aliases: What the names stand for that the file imports.
        waited_for: Names of the file that hold queues, threads and processes.
        queries: Names of the file that hold a text which writes to a database.
        imported: Names of the file that hold no tensors and give none: of packages, and `self.rng`.
        simulators: Functions of the file that may say what an environment answers.
        turns: Whether a turn of a loop of the file, in a function, has an idiom; filled as that is asked.
    """

    statement: ast.stmt
    loops: tuple[Loop, ...]
    function: Function | None = None
    every: ast.expr | None = None
    weights: frozenset[str] = frozenset()
    gradients: frozenset[str] = frozenset()
    norms: frozenset[str] = frozenset()
    hooked: frozenset[str] = frozenset()
    turned: frozenset[str] = frozenset()
    helpers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    rates: frozenset[str] = frozenset()
    groups: frozenset[str] = frozenset()
    given_rates: tuple[ast.expr, ...] = ()
    at_once: frozenset[str] = frozenset()
    saved: frozenset[str] = frozenset()
    texts: frozenset[str] = frozenset()
    aliases: Mapping[str, str] = field(default_factory=dict)
    imported: frozenset[str] = frozenset()
    waited_for: frozenset[str] = frozenset()
    simulators: frozenset[str] = frozenset()
    queries: frozenset[str] = frozenset()
    turns: dict[tuple[str, Loop, Function | None], bool] = field(default_factory=dict)


def by_line(tree: ast.Module) -> dict[int, list[Place]]:
    """Returns the statements on each line, without those that go on in another one there."""
    lines: dict[int, list[Place]] = {}
    for line, place in _places(tree):
        others = [each for each in lines.get(line, []) if place.statement not in ast.walk(each.statement)]
        lines[line] = [*others, place]
    return lines


def innermost(places: Sequence[Place]) -> Place | None:
    """Returns the place that is furthest inside loops, of those on one line."""
    return max(places, key=lambda place: len(place.loops), default=None)


def _places(tree: ast.Module) -> Iterator[tuple[int, Place]]:
    """Yields each line that holds code, outer statements before those in them."""
    pending: list[tuple[ast.AST, tuple[Loop, ...], Function | None, ast.expr | None]] = [
        (tree, (), None, None)
    ]
    while pending:
        node, loops, function, every = pending.pop(0)
        if isinstance(node, ast.stmt) and not isinstance(node, Separate):
            place = Place(node, loops, function, every)
            inner = [
                child.lineno
                for child in ast.walk(node)
                if isinstance(child, (ast.stmt, ast.ExceptHandler)) and child is not node
            ]
            end = min(inner) - 1 if inner else node.end_lineno or node.lineno
            for line in range(node.lineno, max(end, node.lineno) + 1):
                yield line, place
        inside = (node, *loops) if isinstance(node, Loop) else loops
        if isinstance(node, Function):
            inside, function, every = (), node, None
        branch = node if isinstance(node, ast.If) and _is_rhythm(node) else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                rare = branch is not None and child in branch.body
                pending.append((child, inside, function, branch.test if branch and rare else every))


def _is_rhythm(branch: ast.If) -> bool:
    """Whether a branch is there to do something only every so many steps: not to train, as with accumulated
    gradients, nor on one rank."""
    if names_in(branch.test) & {"rank", "local_rank", "worker", "worker_id", "world_size"}:
        return False
    trains = any(is_call(node, {*TRAINS, "zero_grad"}) for node in ast.walk(branch))
    return not trains and any(_remainders(branch.test))


def _remainders(test: ast.expr) -> Iterator[ast.BinOp]:
    """Yields the remainders that a condition wants to be one number: `a % b == c`, `not a % b`."""
    for node in ast.walk(test):
        found: ast.expr | None = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            found = node.left
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = node.operand
        # What is taken of a constant is a text that is formatted.
        if is_operation(found, ast.Mod) and not isinstance(found.left, ast.Constant):
            yield found


def rarer(condition: str, times: int = 10) -> str:
    """Returns `step % 10 == 0` with a divisor so many times as large; empty where it is no number."""
    tree = ast.parse(condition, mode="eval")
    for remainder in _remainders(tree.body):
        divisor = remainder.right
        if isinstance(divisor, ast.Constant) and isinstance(divisor.value, int):
            remainder.right = ast.Constant(divisor.value * times)
            return ast.unparse(tree)
    return ""
