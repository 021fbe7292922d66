"""The statements of a file by line, and what names and calls are in them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

Loop = ast.For | ast.AsyncFor | ast.While
Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign
Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module


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


def expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    """Yields a statement's own expressions, without those of statements in it."""
    for _, value in ast.iter_fields(statement):
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, ast.expr):
                yield item
            elif isinstance(item, ast.withitem):
                yield item.context_expr


def nodes_of(statement: ast.stmt) -> list[ast.AST]:
    """Returns all that a statement's own expressions are made of."""
    return [node for expression in expressions(statement) for node in ast.walk(expression)]


def calls_of(statement: ast.stmt) -> list[ast.Call]:
    """Returns the calls in a statement's own expressions."""
    return [node for node in nodes_of(statement) if isinstance(node, ast.Call)]


def callee(call: ast.Call) -> tuple[str, str]:
    """Returns what is called and on what: `("item", "loss")`; the latter is only a hint."""
    function = call.func
    if isinstance(function, ast.Name):
        return function.id, ""
    if isinstance(function, ast.Attribute):
        return function.attr, ast.unparse(function.value)
    return "", ""


def given_to(call: ast.Call) -> list[ast.expr]:
    """Returns what a call is given, by place or by name."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def parameters_of(function: Function) -> list[str]:
    """Returns the parameters of a function that are given by place."""
    return [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]


def bound(call: ast.Call, function: Function | None) -> list[tuple[str, ast.expr]]:
    """Returns the parameters of a function, other than its object, and what a call gives them; where it is
    not known, those that are named."""
    taken = parameters_of(function) if function is not None else []
    taken = taken[1:] if taken[:1] in (["self"], ["cls"]) else taken
    named = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg]
    return [*zip(taken, call.args, strict=False), *named]


def names(nodes: Iterable[ast.AST]) -> set[str]:
    """Returns the names and attributes among nodes."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.Name):
            found.add(node.id)
    return found


@cache
def words(name: str) -> frozenset[str]:
    """Returns the words of a name, in small letters: `logMetrics_v2` has log, metrics and v2."""
    return frozenset(word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name))


def words_of(all_names: Iterable[str]) -> set[str]:
    """Returns the words of several names."""
    return {word for name in all_names for word in words(name)}


def innermost(places: Sequence[Place]) -> Place | None:
    """Returns the place that is furthest inside loops, of those on one line."""
    return max(places, key=lambda place: len(place.loops), default=None)


def assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields what is assigned to, and what to it; of `a, b = c, d` one by one."""
    if not isinstance(node, ast.Assign):
        return
    for target in node.targets:
        if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
            yield from zip(target.elts, node.value.elts, strict=False)
        else:
            yield target, node.value


def functions_of(tree: ast.Module) -> Iterator[Scope]:
    yield tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node


def innermost_of(functions: list[Scope], line: int) -> int:
    """Returns the index of the innermost function that holds a line; 0 is the module."""
    best, span = 0, float("inf")
    for index, function in enumerate(functions):
        if isinstance(function, ast.Module):
            continue
        end = function.end_lineno or function.lineno
        if function.lineno <= line <= end and end - function.lineno < span:
            best, span = index, end - function.lineno
    return best


def statements_of(function: Scope) -> Iterator[ast.stmt]:
    """Yields the statements of a function, of every depth, but not those of functions inside it."""
    pending: list[ast.stmt] = list(function.body)
    while pending:
        statement = pending.pop()
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        yield statement
        for _, value in ast.iter_fields(statement):
            if isinstance(value, list):
                for item in value:
                    if isinstance(item, ast.stmt):
                        pending.append(item)
                    elif isinstance(item, (ast.ExceptHandler, ast.match_case)):
                        pending.extend(item.body)


def header_lines(statement: ast.stmt) -> range:
    """Returns the lines that a statement itself occupies, without those of the statements in it."""
    end = statement.end_lineno or statement.lineno
    inner = [node.lineno for node in ast.iter_child_nodes(statement) if isinstance(node, ast.stmt)]
    if inner:
        end = max(statement.lineno, min(inner) - 1)
    return range(statement.lineno, end + 1)


def _places(tree: ast.Module) -> Iterator[tuple[int, Place]]:
    """Yields each line that holds code, outer statements before those in them."""
    pending: list[tuple[ast.AST, tuple[Loop, ...], Function | None, ast.expr | None]] = [
        (tree, (), None, None)
    ]
    while pending:
        node, loops, function, every = pending.pop(0)
        if isinstance(node, ast.stmt) and not isinstance(
            node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            place = Place(node, loops, function, every)
            inner = [
                child.lineno
                for child in ast.walk(node)
                if isinstance(child, (ast.stmt, ast.ExceptHandler)) and child is not node
            ]
            end = min(inner) - 1 if inner else node.end_lineno or node.lineno
            for line in range(node.lineno, max(end, node.lineno) + 1):
                yield line, place
        inside = (node, *loops) if isinstance(node, (ast.For, ast.AsyncFor, ast.While)) else loops
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            inside, function, every = (), node, None
        branch = node if isinstance(node, ast.If) and _is_rhythm(node) else None
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.stmt, ast.ExceptHandler, ast.match_case)):
                rare = branch is not None and child in branch.body
                pending.append((child, inside, function, branch.test if branch and rare else every))


def _is_rhythm(branch: ast.If) -> bool:
    """Whether a branch is there to do something only every so many steps: not to train, as with accumulated
    gradients, nor on one rank."""
    if names(ast.walk(branch.test)) & {"rank", "local_rank", "worker", "worker_id", "world_size"}:
        return False
    calls = {callee(node)[0] for node in ast.walk(branch) if isinstance(node, ast.Call)}
    return not calls & {"step", "backward", "zero_grad"} and any(_remainders(branch.test))


def _remainders(test: ast.expr) -> Iterator[ast.BinOp]:
    """Yields the remainders that a condition wants to be one number: `a % b == c`, `not a % b`."""
    for node in ast.walk(test):
        found: ast.expr | None = None
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            found = node.left
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            found = node.operand
        if not isinstance(found, ast.BinOp) or not isinstance(found.op, ast.Mod):
            continue
        if not isinstance(found.left, ast.Constant):  # else a text that is formatted
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
