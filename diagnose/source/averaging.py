"""Whether a statement, in a loop over weights, averages them."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence

from diagnose.source.calling import is_call, keyword_of
from diagnose.source.names import names, names_in, variables, words, words_of
from diagnose.source.place import Place
from diagnose.source.statements import assigned, is_operation, nodes_of, statements_in
from diagnose.source.weight_loops import WRITES, changed, data_of, in_pairs, key, sources, turns
from diagnose.source.weight_words import GRADIENTS, KEEPS, OVER_WEIGHTS

IN_PLACE = {*WRITES, "mul", "lerp"}
AVERAGED_WORDS = {"ema", "shadow", "avg", "average", "averaged", "target", "teacher", "decay"}

SCALE, ADD = "scale", "add"
OF_METHOD = {"mul_": SCALE, "div_": SCALE, "add_": ADD, "sub_": ADD}
"""What methods do to what they are called on."""


def averages(place: Place, nodes: Sequence[ast.AST], gone_over: set[str], *, pairs: bool = True) -> bool:
    """Whether a statement averages one weight after the other.

    Args:
        nodes: What the statement's own expressions are made of.
        gone_over: The names in what the loops around and in it go over.
        pairs: Whether it does if it computes one of a turn's weights from the other.
    """
    used = names(nodes)
    decays_weights = {name for name in used if {"weight", "decay"} <= words(name)}
    told = words_of(used - decays_weights) & AVERAGED_WORDS
    assigns = isinstance(place.statement, (ast.Assign, ast.AugAssign)) and not _sums_up(place)
    return bool(
        blends_in(place.statement, nodes)
        or _goes_toward(place)
        or (told and (used & IN_PLACE or assigns))
        or (pairs and scales_and_adds(place))
        or (pairs and in_pairs(place, nodes) and _copies_average(place, used, gone_over))
    )


def blends_in(statement: ast.stmt, nodes: Sequence[ast.AST]) -> bool:
    """Whether a statement goes a part of the way from one value to another."""
    if any(map(_blends, nodes)):
        return True
    change = changed(statement)
    if change is None:
        return False
    target, op, by = change
    return any(_is_way(node, target, op) for value in by for node in ast.walk(value))


def _is_way(value: ast.AST, target: ast.expr, op: ast.operator | None) -> bool:
    """Whether a value is the way from what a statement adds to, or subtracts from, to another value:
    `b - a`, of `a += r * (b - a)`."""
    if not is_operation(value, ast.Sub) or not isinstance(op, (ast.Add, ast.Sub)):
        return False
    return key(value.right if isinstance(op, ast.Add) else value.left) == key(target)


def _goes_toward(place: Place) -> bool:
    """Whether a statement goes a part of the way by what a turn has made for that: `a += r * d`, after
    `d = b - a`; not a moment of a gradient, `m += r * d` after `d = p.grad - m`."""
    change = changed(place.statement)
    if change is None or not place.loops:
        return False
    target, op, by = change
    used = variables(node for value in by for node in ast.walk(value))
    return any(
        isinstance(made, ast.Name)
        and made.id in used
        and _is_way(value, target, op)
        and not names_in(value) & (GRADIENTS | place.gradients)
        for each in ast.walk(place.loops[0])
        for made, value in assigned(each)
    )


def _blends(node: ast.AST) -> bool:
    """Whether an expression goes a part of the way from one value to another: `a * (1 - r) + b * r`, or
    `0.9 * a + 0.1 * b`."""
    if is_call(node, ("lerp", "lerp_")):
        return True
    if is_call(node, {"add_"}) and isinstance(node.func, ast.Attribute):
        added, before = keyword_of(node, "alpha"), node.func.value
        scaled = before.args[0] if is_call(before, {"mul_"}) and before.args else None
        return (
            is_operation(added, ast.Sub)
            and scaled is not None
            and ast.unparse(added) == f"1 - {ast.unparse(scaled)}"
        )
    if not is_operation(node, ast.Add):
        return False
    sides = [side for side in (node.left, node.right) if is_operation(side, ast.Mult)]
    if len(sides) < 2:
        return False
    parts = [_share(side) for side in sides]
    return (all(parts) and math.isclose(sum(parts), 1.0)) or any(
        is_operation(part, ast.Sub) and isinstance(part.left, ast.Constant) and part.left.value == 1
        for side in sides
        for part in ast.walk(side)
    )


def _share(product: ast.BinOp) -> float:
    """Returns the number, written out, that a tensor is scaled by, as it is; 0 of anything else, such as a
    norm: an elastic net is `0.5 * p.abs().sum() + 0.5 * p.pow(2).sum()`."""
    sides = (product.left, product.right)
    numbers = [
        each.value for each in sides if isinstance(each, ast.Constant) and isinstance(each.value, float)
    ]
    scaled = next((each for each in sides if not isinstance(each, ast.Constant)), None)
    while is_call(scaled, KEEPS) and isinstance(scaled.func, ast.Attribute):
        scaled = scaled.func.value
    as_it_is = isinstance(scaled, (ast.Name, ast.Attribute, ast.Subscript))
    return numbers[0] if numbers and as_it_is else 0.0


def _sums_up(place: Place) -> bool:
    """Whether a statement adds to one name, turn by turn, that is none of a turn's: a distance of all
    weights, `far += (p - target).norm()`."""
    statement = place.statement
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.target, ast.Name) and statement.target.id not in turns(place)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Name) or target.id in turns(place):
        return False
    return bool(_change(statement)[1])


def scales_and_adds(place: Place) -> bool:
    """Whether what a statement changes is both scaled and added to, with two weights of a turn:
    `a.mul_(d).add_(b)`, or that in two statements.

    What is scaled alone is masked. What is added to alone is a sum, or gets noise.
    """
    target, does = _change(place.statement)
    rebinds = isinstance(place.statement, ast.Assign) and isinstance(place.statement.targets[0], ast.Name)
    if not does or rebinds:
        return False
    around = place.loops[0] if place.loops else place.function if place.turned else None
    inside = statements_in(around) if around else []
    both = [each for each in inside if _change(each)[0] == target] or [place.statement]
    does = set().union(*(_change(each)[1] for each in both))
    changing = [node for each in both for node in nodes_of(each)]
    paired = in_pairs(place, changing) or _keyed_pair(place, changing)
    return does == {SCALE, ADD} and (paired or len(names(changing) & place.turned - place.gradients) > 1)


def _keyed_pair(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether something is done to one of a turn's weights and to what is kept of it under its name, or to
    two that are kept: `for n, p in net.named_parameters(): kept[n].mul_(d).add_(p)`."""
    for target, source in sources(place, nodes):
        if not names_in(source) & (OVER_WEIGHTS | place.weights):
            continue
        turn = [each.id for each in ast.walk(target) if isinstance(each, ast.Name)]
        if not turn:
            continue
        kept = {
            ast.unparse(node.value)
            for node in nodes
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Name)
            if node.slice.id == turn[0] and names([node.value]) & place.weights
        }
        beside = len(turn) == 2 and any(isinstance(node, ast.Name) and node.id == turn[1] for node in nodes)
        if len(kept) + beside > 1:
            return True
    return False


def _change(statement: ast.stmt) -> tuple[str, set[str]]:
    """Returns what a statement changes, and whether it scales it, adds to it, or does both."""
    does: set[str] = set()
    target: ast.expr
    if isinstance(statement, ast.AugAssign):
        target = statement.target
        does = {_of_operator(statement.op)}
    elif isinstance(statement, ast.Assign):
        target = statement.targets[0]
        does = _made_by(statement.value, key(target))
    elif isinstance(statement, ast.Expr):
        target = statement.value
        while isinstance(target, ast.Call) and isinstance(target.func, ast.Attribute):
            method, args, target = target.func.attr, target.args, data_of(target.func.value)
            does.add(OF_METHOD.get(method, ""))
            if method == "copy_" and args:
                does |= _made_by(args[0], key(target))
    else:
        return "", set()
    return key(target), does - {""}


def _made_by(value: ast.expr, old: str) -> set[str]:
    """Returns whether an expression is made of what `key` calls `old` by scaling it, adding to it, or both;
    an empty text for neither, and nothing where it is made of something else."""
    if key(value) == old:
        return {""}
    if not isinstance(value, ast.BinOp):
        return set()
    found = _made_by(value.left, old) | _made_by(value.right, old)
    return found | {_of_operator(value.op)} if found else found


def _of_operator(operator: ast.operator) -> str:
    if isinstance(operator, (ast.Mult, ast.Div)):
        return SCALE
    return ADD if isinstance(operator, (ast.Add, ast.Sub)) else ""


def _copies_average(place: Place, used: set[str], gone_over: set[str]) -> bool:
    """Whether a statement copies, or assigns, and a name says that this is to average."""
    targets = place.statement.targets if isinstance(place.statement, ast.Assign) else []
    if "copy_" not in used and not any(isinstance(target, ast.Attribute) for target in targets):
        return False
    named = {place.function.name} if isinstance(place.function, ast.FunctionDef) else set()
    return bool(words_of(used | gone_over | named) & AVERAGED_WORDS)
