"""What the loops around a statement go over, turn by turn, and what the statement changes there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from diagnose.source.statements import Place, callee, names
from diagnose.source.weight_words import OVER_WEIGHTS

WRITES = {"mul_", "add_", "lerp_", "copy_", "sub_"}
"""Methods that change a weight, or what is kept beside it."""


def sources(place: Place, nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the variables of the loops around and in a statement, and what each goes over."""
    for statement in (*place.loops, place.statement):
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            yield statement.target, statement.iter
    for node in nodes:
        if isinstance(node, ast.comprehension):
            yield node.target, node.iter


def turns(place: Place) -> set[str]:
    """Returns the variables of the loops around a statement."""
    return names(
        node for loop in place.loops if not isinstance(loop, ast.While) for node in ast.walk(loop.target)
    )


def in_pairs(place: Place, nodes: list[ast.AST]) -> bool:
    """Whether something is done to two of the weights that a `zip` goes over, turn by turn."""
    used = names(nodes)
    for target, source in sources(place, nodes):
        if isinstance(source, ast.Call) and callee(source)[0] == "enumerate" and source.args:
            source = source.args[0]
            target = target.elts[-1] if isinstance(target, ast.Tuple) else target
        if not isinstance(source, ast.Call) or callee(source) != ("zip", "") or len(source.args) < 2:
            continue
        if not names(ast.walk(source)) & (OVER_WEIGHTS | place.weights) or not isinstance(
            target, ast.Tuple
        ):
            continue
        if sum(bool(names(ast.walk(each)) & used) for each in target.elts) >= 2:
            return True
    return False


def changed(statement: ast.stmt) -> tuple[ast.expr, ast.operator | None, list[ast.expr]] | None:
    """Returns what a statement changes in place, whether it adds or subtracts, and what it does that by."""
    if isinstance(statement, ast.AugAssign):
        return statement.target, statement.op, [statement.value]
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    call = statement.value
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in WRITES:
        return None
    op = {"add_": ast.Add(), "sub_": ast.Sub()}.get(call.func.attr)
    return call.func.value, op, call.args


def data_of(node: ast.expr) -> ast.expr:
    """Returns the weight of which an expression is the data: `w` for `w.data`, too."""
    while isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    return node


def key(node: ast.expr) -> str:
    """Returns a text that is the same for a weight and its data, whether read or written."""
    return ast.dump(data_of(node)).replace("Store()", "Load()")
