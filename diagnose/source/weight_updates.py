"""Whether a statement updates weights, or what an optimizer keeps of their gradients, one by one."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from diagnose.source.calling import is_call
from diagnose.source.names import names, names_in, variables
from diagnose.source.place import Place
from diagnose.source.slices import is_side_loop
from diagnose.source.statements import is_operation, nodes_of
from diagnose.source.weight_loops import WRITES, data_of, key, turns
from diagnose.source.weight_words import GRADIENTS
from diagnose.source.weights import turns_of

CHANGES = (WRITES - {"copy_"}) | {"addcdiv_", "addcmul_"}
SCALES = {"mul_", "div_"}
ADDS = {"add", "sub", "subtract", "addcdiv", "addcmul"}


def updates(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether a statement changes in place what a loop goes over, and not gradients: `p -= lr * p.grad`."""
    around = turns(place) | (place.turned - place.gradients)
    return any(
        not names_in(each) & GRADIENTS and (not isinstance(each, ast.Name) or each.id in around)
        for each in _targets(place.statement, nodes)
    )


def _targets(statement: ast.stmt, nodes: Sequence[ast.AST]) -> Iterator[ast.expr]:
    """Yields what a statement changes in place, or puts a result into."""
    if isinstance(statement, ast.AugAssign):
        yield statement.target
    elif isinstance(statement, ast.Assign) and (
        any(isinstance(node, ast.BinOp) for node in nodes) or _moves(statement.value)
    ):
        yield from (target for target in statement.targets if not isinstance(target, ast.Name))
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        anew = is_call(call, {"copy_"}) and any(map(_moves, call.args))
        if isinstance(call.func, ast.Attribute) and (anew or is_call(call, CHANGES)):
            yield call.func.value


def _moves(value: ast.expr) -> bool:
    """Whether something is added to something else, or taken from it."""
    return is_operation(value, ast.Add, ast.Sub) or is_call(value, ADDS)


def changes_own(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether a loop of its own changes in each turn what it asks the gradient of, whatever it goes over:
    `layer.weight.data -= lr * layer.weight.grad`."""
    asked = {key(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "grad"}
    if not asked:
        return False
    changes = bool(place.loops) and bool(asked & set(map(key, _targets(place.statement, nodes))))
    return changes and is_side_loop(place.loops[0])


def keeps_moment(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether a statement adds squares of gradients to what an optimizer keeps of them: that fades, or a
    weight is changed beside it. Sums of their own are statistics: `fisher[n] += p.grad.pow(2)`."""
    statement = place.statement
    if not updates(place, nodes):
        return False
    if isinstance(statement, ast.Assign):  # anew, of what it was
        read = {key(node) for node in ast.walk(statement.value) if isinstance(node, ast.expr)}
        return any(key(target) in read for target in statement.targets) and _moves_weight(place)
    return bool(names(nodes) & SCALES) or _moves_weight(place)


def _moves_weight(place: Place) -> bool:
    """Whether a turn of the loop around a statement changes in another one what it goes over and asks the
    gradient of, or goes over beside gradients."""
    inside = [node for loop in place.loops[:1] for node in ast.walk(loop)]
    asked = {
        node.value.id
        for node in inside
        if isinstance(node, ast.Attribute) and node.attr == "grad" and isinstance(node.value, ast.Name)
    }
    changed_here = set(map(_root, _targets(place.statement, nodes_of(place.statement))))
    beside = (name for name in turns(place) - changed_here if not is_gradient(ast.Name(name), place))
    own = asked or set(beside)
    return any(
        _root(target) in own
        for statement in inside
        if isinstance(statement, ast.stmt) and statement is not place.statement
        for target in _targets(statement, nodes_of(statement))
    )


def _root(node: ast.expr) -> str:
    """Returns the name of what is changed: `p` of `p.data.mul_(d).add_(g)`; of a gradient none."""
    while isinstance(node, ast.Call) or (isinstance(node, ast.Attribute) and node.attr != "grad"):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def is_gradient(node: ast.expr, place: Place) -> bool:
    """Whether an expression is the gradient of one weight: `p.grad.data`, or the turn of a loop over
    gradients."""
    node = data_of(node)
    if isinstance(node, ast.Attribute):
        return node.attr == "grad"
    if not isinstance(node, ast.Name):
        return False
    for turn, source in turns_of(place.loops[0]) if place.loops else ():
        if isinstance(turn, ast.Name) and turn.id == node.id:
            return bool(names_in(source) & (GRADIENTS | place.gradients))
    return node.id in aliases(place) | (place.turned & place.gradients)


def aliases(place: Place) -> set[str]:
    """Returns the names that get a gradient in each turn of the loop around a statement: `g`, of
    `g = p.grad`."""
    nodes = (node for loop in place.loops[:1] for node in ast.walk(loop))
    return variables(nodes, ast.Store) & place.gradients
