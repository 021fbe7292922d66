"""Which values of a function gradients pass through, as far as its text tells: not through what compares,
counts or ranks."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from diagnose.source.calling import callee, is_call
from diagnose.source.kinds import Comprehension, Definition, ForLoop, With
from diagnose.source.reads_writes import MODULES, closure, reads, writes
from diagnose.source.statements import element_of, is_operation, statements_of

CUTS = {
    *("detach", "item", "tolist", "numpy", "long", "size", "numel", "dim"),
    *("argmax", "argmin", "argsort", "bincount", "histc", "nonzero", "one_hot", "searchsorted"),
    *("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite"),
}
"""Functions and methods that give no gradients back."""

CASTS = {"float", "int", "bool", "len", "str", "range", "round", "isinstance"}
"""Likewise, of Python."""

NO_VALUES = {"data", "shape", "dtype", "device", "ndim", "indices"}
"""Attributes of a tensor, or of what `topk` returns, that have no gradients."""

WITH_PLACES = {"topk", "max", "min", "sort", "kthvalue", "median", "mode", "cummax", "cummin"}
"""Functions that return values and, as the second, where these were."""


class Gradients:
    """Answers by a script's functions which expressions have gradients. What it cannot tell has them."""

    def __init__(self, functions: Mapping[str, Sequence[tuple[str, Definition]]]) -> None:
        self._functions = functions
        self._known: dict[str, bool] = {}

    def names(self, statements: Iterable[ast.stmt], sources: Collection[str]) -> set[str]:
        """Returns the names that may hold what gradients pass through, in whatever order statements run,
        where the sources do to begin with."""
        assigned = [each for statement in statements for each in _assigned(statement)]

        def more(found: set[str]) -> Iterator[str]:
            return (
                name
                for value, written in assigned
                if not written <= found and self.pass_through(value, found)
                for name in written
            )

        return closure(set(sources), more)

    def pass_through(self, node: ast.AST, held: Collection[str]) -> bool:
        """Whether an expression, or a part of one, has gradients where the names that are held have."""
        if isinstance(node, (ast.Compare, ast.Constant, ast.JoinedStr, ast.Lambda)):
            return False
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return False
        if is_operation(node, ast.FloorDiv):
            return False
        if isinstance(node, ast.Name):
            return node.id in held
        if isinstance(node, ast.Attribute):
            if node.attr in NO_VALUES:
                return False
            return ast.unparse(node) in held or self.pass_through(node.value, held)
        if isinstance(node, ast.Subscript):  # what is asked for by a value is not made of it
            return not _is_place(node) and self.pass_through(node.value, held)
        if isinstance(node, ast.IfExp):
            return self.pass_through(node.body, held) or self.pass_through(node.orelse, held)
        if isinstance(node, Comprehension):
            inside = set(held)
            for each in node.generators:
                if self.pass_through(each.iter, inside):
                    inside |= _written(each.target)
            return self.pass_through(element_of(node), inside)
        if isinstance(node, ast.Call) and self._cuts(node):
            return False
        return any(self.pass_through(child, held) for child in ast.iter_child_nodes(node))

    def _cuts(self, call: ast.Call) -> bool:
        name, base = callee(call)
        return name in CUTS or (not base and name in CASTS) or not self._given_by(name)

    def _given_by(self, name: str) -> bool:
        """Whether what functions of a name return may have gradients, if all that they are given has."""
        if name not in self._known:
            self._known[name] = True  # for one that calls itself
            found = self._functions.get(name, ())
            self._known[name] = not found or any(self._gives(function) for _, function in found)
        return self._known[name]

    def _gives(self, function: Definition) -> bool:
        statements = list(statements_of(function))
        inside = [node for statement in statements for node in ast.walk(statement)]
        if any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in inside):
            return True
        own = set().union(*map(writes, statements))
        used = {name for s in statements for name in reads(s) if name.isidentifier()}
        outer = {name for name in used - own - MODULES if not hasattr(builtins, name)}
        sources = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
        held = self.names(statements, sources | (outer - self._functions.keys()))
        values = (s.value for s in statements if isinstance(s, ast.Return) and s.value is not None)
        return any(self.pass_through(value, held) for value in values)


def _assigned(statement: ast.stmt) -> Iterator[tuple[ast.expr, set[str]]]:
    """Yields what a statement assigns and to which names, with those of their containers."""
    if isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _pairs(target, statement.value)
    elif isinstance(statement, ForLoop):
        yield statement.iter, _written(statement.target)
    elif isinstance(statement, With):
        for item in statement.items:
            if item.optional_vars is not None:
                yield item.context_expr, _written(item.optional_vars)
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign, ast.Expr)) and statement.value is not None:
        yield statement.value, _with_containers(writes(statement))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, set[str]]]:
    several = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    values = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
    starred = any(isinstance(each, ast.Starred) for each in (*several, *values))
    if several and len(several) == len(values) and not starred:
        for each, item in zip(several, values, strict=True):
            yield from _pairs(each, item)
        return
    if len(several) == 2 and is_call(value, WITH_PLACES):
        target = several[0]
    yield value, _written(target)


def _written(target: ast.expr) -> set[str]:
    return _with_containers(writes(ast.Assign(targets=[target], value=ast.Constant(value=None))))


def _with_containers(names: set[str]) -> set[str]:
    return names | {name.partition("[")[0] for name in names}


def _is_place(node: ast.Subscript) -> bool:
    """Whether an expression is where the largest value was: `out.max(1)[1]`."""
    return (
        is_call(node.value, WITH_PLACES) and isinstance(node.slice, ast.Constant) and node.slice.value == 1
    )
