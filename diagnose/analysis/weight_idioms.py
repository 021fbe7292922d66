"""What a statement does to weights or their gradients, one after the other: clip, average, or update."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from diagnose.analysis.statements import Place, callee, names, words, words_of
from diagnose.analysis.weights import ASKED

CLIP = "clip"
"""Norms or scales gradients tensor by tensor."""
EMA = "ema"
"""Averages weights tensor by tensor."""
UPDATE = "update"
"""Updates weights by their gradients, tensor by tensor."""

WRITES = {"mul_", "add_", "lerp_", "copy_", "sub_"}
CHANGES = (WRITES - {"copy_"}) | {"addcdiv_", "addcmul_"}
IN_PLACE = {*WRITES, "mul", "lerp"}
GRADIENT_MATH = {"norm", "vector_norm", "clamp_", "clip_", "pow", "square", "sum"}
GRADIENTS = {"grad", "grads", "gradients"}
SCALES = {"mul_", "div_"}
CLIPPING_WORDS = {"clip", "clipped", "coef", "coefficient", "norm", "max", "scale"}
AVERAGING_WORDS = {"world", "size", "ranks", "steps", "accumulation", "loss", "inv"}
"""Gradients are also scaled to be averaged among ranks, or over micro-batches, or as their loss was."""
AVERAGED_WORDS = {"ema", "shadow", "avg", "average", "averaged", "target", "teacher", "decay"}

OVER_WEIGHTS = {*ASKED, "params", "grads", "param_groups"}


def of_weights(place: Place, nodes: list[ast.AST]) -> Iterator[str]:
    """Yields what a statement does to one weight after the other."""
    iterated = _iterated(place, nodes)
    gone_over = names(node for source in iterated for node in ast.walk(source))
    gradients = gone_over & place.gradients
    if not gradients and not gone_over & (OVER_WEIGHTS | place.weights):
        if iterated and _blends_in(place.statement, nodes) and _knows_weights(place):
            yield EMA  # of what was kept of them: `{k: d * v + (1 - d) * now[k] for k, v in kept.items()}`
        return
    used = names(nodes)
    if gradients or (used | gone_over) & GRADIENTS:
        told = words_of(used)
        scales = used & SCALES and told & CLIPPING_WORDS and not told & AVERAGING_WORDS
        measures = bool(used & GRADIENT_MATH or scales)
        if measures and not _projects(place):
            yield CLIP
        elif _updates(place, nodes) and (not measures or gone_over & (OVER_WEIGHTS - GRADIENTS)):
            yield UPDATE
        return
    decays_weights = {name for name in used if {"weight", "decay"} <= words(name)}
    told = words_of(used - decays_weights) & AVERAGED_WORDS
    assigns = isinstance(place.statement, (ast.Assign, ast.AugAssign))
    in_pairs = _in_pairs(place, nodes)
    if _blends_in(place.statement, nodes) or (told and (used & IN_PLACE or assigns)):
        yield EMA
    elif _updates(place, nodes) and _beside_gradients(place, in_pairs=in_pairs):
        yield UPDATE
    elif in_pairs and _averages_in_place(place, nodes, gone_over):
        yield EMA


def _beside_gradients(place: Place, *, in_pairs: bool) -> bool:
    """Whether a statement is a part of an update, as its loop reads gradients: `p.add_(m, alpha=-lr)` after
    `m.mul_(beta).add_(p.grad)`. Of two weights it must change the one with the gradient."""
    turns = [node for loop in place.loops[:1] for node in ast.walk(loop)]
    read = [node for node in turns if isinstance(node, ast.Attribute) and node.attr == "grad"]
    own = {ast.unparse(node.value) for node in read}
    changed = _changed(place.statement)
    root = changed[0] if changed else None
    while isinstance(root, (ast.Call, ast.Attribute)):
        root = root.func if isinstance(root, ast.Call) else root.value
    return bool(own) and (not in_pairs or (root is not None and ast.unparse(root) in own))


def _changed(statement: ast.stmt) -> tuple[ast.expr, ast.operator | None, list[ast.expr]] | None:
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


def _projects(place: Place) -> bool:
    """Whether a statement adds a product to a gradient, or to what a loop goes over: `g -= (g @ h) * h`.

    To clip is to multiply by a number, or to sum norms.
    """
    changed = _changed(place.statement)
    if changed is None or not isinstance(changed[1], (ast.Add, ast.Sub)):
        return False
    target, _, by = changed
    is_gradient = names(ast.walk(target)) & GRADIENTS
    is_turn = isinstance(_data_of(target), ast.Name) and names([_data_of(target)]) & _turns(place)
    return bool(is_gradient or is_turn) and any(
        isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div))
        for value in by
        for node in ast.walk(value)
    )


def _turns(place: Place) -> set[str]:
    """Returns the variables of the loops around a statement."""
    return names(
        node for loop in place.loops if not isinstance(loop, ast.While) for node in ast.walk(loop.target)
    )


def _updates(place: Place, nodes: list[ast.AST]) -> bool:
    """Whether a statement changes in place what a loop goes over, and not gradients: `p -= lr * p.grad`."""
    statement = place.statement
    changed: list[ast.expr] = []
    if isinstance(statement, ast.AugAssign):
        changed = [statement.target]
    elif isinstance(statement, ast.Assign) and any(isinstance(node, ast.BinOp) for node in nodes):
        changed = [target for target in statement.targets if not isinstance(target, ast.Name)]
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        function = statement.value.func
        if isinstance(function, ast.Attribute) and function.attr in CHANGES:
            changed = [function.value]
    turns = _turns(place)
    return any(
        not names(ast.walk(each)) & GRADIENTS and (not isinstance(each, ast.Name) or each.id in turns)
        for each in changed
    )


def _blends_in(statement: ast.stmt, nodes: list[ast.AST]) -> bool:
    """Whether a statement goes a part of the way from one value to another."""
    if any(map(_blends, nodes)):
        return True
    changed = _changed(statement)
    if changed is None:
        return False
    target, op, by = changed
    own = ast.dump(_data_of(target), include_attributes=False).replace("Store()", "Load()")
    for node in (node for value in by for node in ast.walk(value)):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
            continue
        old = node.right if isinstance(op, ast.Add) else node.left  # `a += r * (b - a)`
        if isinstance(op, (ast.Add, ast.Sub)) and ast.dump(_data_of(old)) == own:
            return True
    return False


def _blends(node: ast.AST) -> bool:
    """Whether an expression goes a part of the way from one value to another: `a * (1 - r) + b * r`."""
    if isinstance(node, ast.Call):
        return callee(node)[0] in ("lerp", "lerp_")
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    sides = (node.left, node.right)
    return all(isinstance(side, ast.BinOp) and isinstance(side.op, ast.Mult) for side in sides) and any(
        isinstance(part, ast.BinOp)
        and isinstance(part.op, ast.Sub)
        and isinstance(part.left, ast.Constant)
        and part.left.value == 1
        for side in sides
        for part in ast.walk(side)
    )


def _data_of(node: ast.expr) -> ast.expr:
    """Returns the weight of which an expression is the data: `w` for `w.data`, too."""
    while isinstance(node, ast.Attribute) and node.attr == "data":
        node = node.value
    return node


def _in_pairs(place: Place, nodes: list[ast.AST]) -> bool:
    """Whether a statement does something to two of the weights that a `zip` goes over, turn by turn."""
    used = names(nodes)
    for target, source in _sources(place, nodes):
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


def _averages_in_place(place: Place, nodes: list[ast.AST], gone_over: set[str]) -> bool:
    """Whether a statement computes something into what there is: `a.mul_(d).add_(b)`, `a.data = d * b`.

    To copy, or to assign what was not computed, is to average only where a name says so.
    """
    statement = place.statement
    computes = any(isinstance(node, ast.BinOp) for node in nodes)
    assigned = statement.targets if isinstance(statement, ast.Assign) else []
    into = [target for target in assigned if isinstance(target, (ast.Attribute, ast.Subscript))]
    used = names(nodes)
    if used & (WRITES - {"copy_"}) or isinstance(statement, ast.AugAssign) or (into and computes):
        return True
    if "copy_" not in used and not any(isinstance(target, ast.Attribute) for target in into):
        return False
    named = {place.function.name} if isinstance(place.function, ast.FunctionDef) else set()
    return computes or bool(words_of(used | gone_over | named) & AVERAGED_WORDS)


def _sources(place: Place, nodes: list[ast.AST]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yields the variables of the loops around and in a statement, and what each goes over."""
    for statement in (*place.loops, place.statement):
        if isinstance(statement, (ast.For, ast.AsyncFor)):
            yield statement.target, statement.iter
    for node in nodes:
        if isinstance(node, ast.comprehension):
            yield node.target, node.iter


def _iterated(place: Place, nodes: list[ast.AST]) -> list[ast.expr]:
    """Returns what the loops around and in a statement go over."""
    return [source for _, source in _sources(place, nodes)]


def _knows_weights(place: Place) -> bool:
    """Whether the function around a statement asks a model for its weights, and what is averaged is named
    for that."""
    if place.function is None:
        return False
    known = names(ast.walk(place.function))
    return bool(known & ASKED) and bool(words_of(known) & AVERAGED_WORDS)
