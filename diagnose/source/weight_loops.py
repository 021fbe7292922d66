"""What the loops around a statement go over, turn by turn, and what the statement changes there."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from diagnose.source.calling import callee, is_call, keyword_of
from diagnose.source.kinds import ForLoop
from diagnose.source.names import last_name, names, names_in
from diagnose.source.place import Place
from diagnose.source.reads_writes import key_of
from diagnose.source.weight_words import ASKED, OVER_WEIGHTS, PASS_ON

WRITES = {"mul_", "add_", "lerp_", "copy_", "sub_"}
"""Methods that change a weight, or what is kept beside it."""


def sources(place: Place, nodes: Sequence[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the variables of the loops around and in a statement, and what each goes over."""
    for statement in (*place.loops, place.statement):
        if isinstance(statement, ForLoop):
            yield statement.target, statement.iter
    for node in nodes:
        if isinstance(node, ast.comprehension):
            yield node.target, node.iter


def turns(place: Place) -> set[str]:
    """Returns the variables of the loops around a statement."""
    return names_in(*(loop.target for loop in place.loops if isinstance(loop, ForLoop)))


def in_pairs(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether something is done to two of the weights that a `zip` goes over, turn by turn."""
    used = names(nodes)
    for target, source in sources(place, nodes):
        if is_call(source, {"enumerate"}) and source.args:
            source = source.args[0]
            target = target.elts[-1] if isinstance(target, ast.Tuple) else target
        if not isinstance(source, ast.Call) or callee(source) != ("zip", "") or len(source.args) < 2:
            continue
        if not isinstance(target, ast.Tuple) or not names_in(source) & (OVER_WEIGHTS | place.weights):
            continue
        if sum(bool(names_in(each) & used) for each in target.elts) >= 2:
            return True
    return False


def clips_one(call: ast.Call, place: Place) -> bool:
    """Whether torch is asked to clip the gradient of one weight after the other: `clip_grad_norm_(p, 1.0)`
    in a loop over the weights, not over lists of them; or `clip_grad_norm_([p], 1.0)`. Where a name may
    hold such lists, `p` is one weight if its gradient is asked for."""
    given = call.args[0] if call.args else keyword_of(call, "parameters")
    alone = isinstance(given, (ast.List, ast.Tuple)) and len(given.elts) == 1
    if isinstance(given, (ast.List, ast.Tuple)) and alone:
        given = given.elts[0]
    if not isinstance(given, ast.Name) or not last_name(call.func).startswith("clip_grad"):
        return False
    if given.id in place.hooked:
        return True
    if given.id in place.turned and place.function is not None:
        return alone or _asks_gradient(place.function, given.id)
    for loop in place.loops:
        if isinstance(loop, ast.While) or given.id not in names_in(loop.target):
            continue
        over = loop.iter
        while is_call(over, PASS_ON) and over.args:
            over = over.args[0]
        if isinstance(over, ast.Call):
            return is_call(over, ASKED)
        if isinstance(over, ast.Subscript):
            return key_of(over) == "params"
        if not names([over]) & (OVER_WEIGHTS | place.weights):
            return False
        return alone or _asks_gradient(loop, given.id)
    return False


def _asks_gradient(inside: ast.AST, name: str) -> bool:
    """Whether something asks for the gradient of what a name holds, which a list of weights has none of."""
    asked = (node for node in ast.walk(inside) if isinstance(node, ast.Attribute))
    return any(node.attr in ("grad", "requires_grad") and names([node.value]) == {name} for node in asked)


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
