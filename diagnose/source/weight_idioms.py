"""What a statement does to weights or their gradients, one after the other: clip, average, or update."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from diagnose.source.averaging import AVERAGED_WORDS, averages, blends_in, scales_and_adds
from diagnose.source.calling import callee, calls_of, given_to, is_call, parameters_of
from diagnose.source.kinds import Definition, Loop
from diagnose.source.names import last_name, names, names_in, words, words_of
from diagnose.source.place import Place
from diagnose.source.purposes import CLIP, EMA, UPDATE, WHOLE
from diagnose.source.reads_writes import in_place, key_of, writes
from diagnose.source.slices import is_side_loop
from diagnose.source.statements import element_of, is_operation, nodes_of, targets_of
from diagnose.source.tensor_operations import (
    ELEMENTWISE,
    MARKS,
    NUMBERS,
    is_elementwise,
    is_product,
    takes_lists,
)
from diagnose.source.weight_loops import changed, data_of, in_pairs, sources, turns
from diagnose.source.weight_updates import SCALES, aliases, changes_own, is_gradient, keeps_moment, updates
from diagnose.source.weight_words import ASKED, GRADIENTS, HOOKS, KEEPS, OVER_WEIGHTS

NORMS = {"norm", "vector_norm"}
SUMS = {*NORMS, "clamp_", "clip_", "sum"}
SQUARES = {"pow", "square"}
"""Of these alone nothing is measured where a statement keeps moments by them, as an Adam does."""
BESIDE = NUMBERS | MARKS | {"clone", "to", "view", "zeros_like", "ones_like", "setdefault", "get"}
"""What an update by hand calls besides elementwise operations."""
CLAMPS = {"clamp", "clip", "clamp_", "clip_"}
SCALED = {*CLAMPS, *SCALES, "mul", "div"}
CLIPPING_WORDS = {"clip", "clipped", "coef", "coefficient", "norm", "max", "scale"}
AVERAGING_WORDS = {"world", "size", "ranks", "steps", "accumulation", "loss", "inv"}
"""Gradients are also scaled to be averaged among ranks, or over micro-batches, or as their loss was."""

STATES = {"state_dict", "load_state_dict"}

OF_AVERAGES = AVERAGED_WORDS - {"avg", "decay"}
"""Optimizers call averages of gradients `exp_avg`."""


def of_weights(place: Place, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yields what a statement does to one weight after the other."""
    iterated = [source for _, source in sources(place, nodes)]
    if place.turned and not place.hooked and not iterated:
        yield from _of_turn(place, nodes)
        return
    if place.helpers:
        helped = {idiom for name in map(helper_of, nodes) for idiom in place.helpers.get(name, ())}
        if helped:
            yield from helped
            return
    if _makes_anew(place) or changes_own(place, nodes):
        yield UPDATE
        return
    gone_over = names_in(*iterated) | place.hooked
    used = names(nodes)
    gradients = gone_over & place.gradients
    if not gradients and not gone_over & (OVER_WEIGHTS | place.weights | place.hooked):
        # Of what was kept of them: `{k: d * v + (1 - d) * now[k] for k, v in kept.items()}`.
        if iterated and used & (ASKED | place.weights) and blends_in(place.statement, nodes):
            yield EMA
        return
    if not gradients and not (used | gone_over) & GRADIENTS and not used & (HOOKS | aliases(place)):
        beside = updates(place, nodes) and _beside_gradients(place, nodes)
        if averages(place, nodes, gone_over, pairs=not beside):
            yield EMA
        elif beside:
            yield UPDATE
        return
    told = words_of(used)
    scales = used & SCALES and told & CLIPPING_WORDS and not told & AVERAGING_WORDS
    makes_average = blends_in(place.statement, nodes)  # of squares: it is an optimizer's
    squares = used & SQUARES and not makes_average and not keeps_moment(place, nodes)
    measures = bool(used & SUMS or squares or scales or _clips(place))
    if measures and not makes_average and not _projects(place):
        yield CLIP
    elif updates(place, nodes) and (not measures or gone_over & (OVER_WEIGHTS - GRADIENTS)):
        yield UPDATE


def helpers_of(places: Iterable[Place]) -> dict[str, frozenset[str]]:
    """Returns what the functions do that loops give one weight after the other, as `helper_of` calls them:
    the time of a short function is often found on the line that calls it."""
    does: dict[str, set[str]] = {}
    for place in places:
        function = place.function
        if place.turned and isinstance(function, Definition):
            static = any(
                isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list
            )
            is_method = static or parameters_of(function)[:1] in (["self"], ["cls"])
            name = f".{function.name}" if is_method else function.name
            does.setdefault(name, set()).update(of_weights(place, nodes_of(place.statement)))
    return {name: frozenset(found) for name, found in does.items() if found}


def helper_of(node: ast.AST) -> str:
    """Returns the name of what is called, with a dot before a method's."""
    name, base = callee(node) if isinstance(node, ast.Call) else ("", "")
    return f".{name}" if base else name


def _of_turn(place: Place, nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yields what a statement does to the weight, or its gradient, which loops give to its function.

    As any function may be given one, a measure must be of one gradient, and an average of two weights.
    """
    used = names(nodes)
    given = used & place.turned
    gradients = given & place.gradients
    if not given:
        return
    if _is_step(place):
        yield UPDATE
    elif not gradients and not used & GRADIENTS:
        if (len(given) > 1 and blends_in(place.statement, nodes)) or scales_and_adds(place):
            yield EMA
        elif place.turned & place.gradients and updates(place, nodes):
            yield UPDATE
    elif len(gradients) < 2 and not _changes_given(place) and (_sums_squares(nodes) or _limits(place)):
        yield CLIP
    elif updates(place, nodes):
        yield UPDATE


def _is_step(place: Place) -> bool:
    """Whether a function that is given a weight and its gradient returns that weight, moved, beside the
    moments that it keeps: `w = w - lr * m / (v.sqrt() + eps)`, `return w, m, v`. One that returns a weight
    alone may be a step inside of a loss."""
    weights = place.turned - place.gradients
    if not weights or not place.turned & place.gradients:
        return False
    inside = list(ast.walk(place.function)) if place.function is not None else []
    returned = [
        node.value for node in inside if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)
    ]
    values = [(names_in(part), part) for value in returned for part in value.elts]
    values += [(names(node.targets), node.value) for node in inside if isinstance(node, ast.Assign)]
    given_back = names_in(*returned)
    for held, value in values:
        if isinstance(value, ast.BinOp) and isinstance(value.op, (ast.Add, ast.Sub)) and held & given_back:
            old = data_of(value.left)
            if isinstance(old, ast.Name) and old.id in weights:
                return True
    return False


def _changes_given(place: Place) -> bool:
    """Whether a statement changes the weight, not the gradient, that its function was given."""
    change, statement = changed(place.statement), place.statement
    targets = [change[0]] if change else statement.targets if isinstance(statement, ast.Assign) else []
    held = map(names_in, targets)
    return any(each & place.turned - place.gradients and not each & GRADIENTS for each in held)


def _sums_squares(nodes: Sequence[ast.AST]) -> bool:
    """Whether a norm is taken, or squares are summed: `(g * g).sum()`, `g.pow(2).sum()`."""
    used = names(nodes)
    squares = any(
        is_operation(node, ast.Pow)
        or (is_operation(node, ast.Mult) and ast.dump(node.left) == ast.dump(node.right))
        for node in nodes
    )
    return bool(used & NORMS) or ("sum" in used and (squares or bool(used & SQUARES)))


def _limits(place: Place) -> bool:
    """Whether a function limits the gradient that it is given, in its place or in what it returns, or
    scales it there by its norm: `g.clamp_(-c, c)`."""
    statement = place.statement
    value = statement.value if isinstance(statement, (ast.Expr, ast.Return)) else None
    if is_call(value, CLAMPS) and isinstance(value.func, ast.Attribute):
        of_torch = callee(value)[1] == "torch"
        operands = value.args[:1] if of_torch else [value.func.value]
        return any(is_gradient(each, place) for each in operands)
    return any(names_in(factor) & place.norms for factor in _new_gradients(place))


def _makes_anew(place: Place) -> bool:
    """Whether a statement makes all weights anew of them and their gradients:
    `params = [p - lr * g for p, g in zip(params, grads)]`."""
    statement = place.statement
    made = statement.value if isinstance(statement, ast.Assign) else None
    while isinstance(made, ast.Call) and callee(made) in (("list", ""), ("tuple", ""), ("dict", "")):
        made = made.args[0] if made.args else None
    if not isinstance(statement, ast.Assign) or not isinstance(
        made, (ast.ListComp, ast.GeneratorExp, ast.DictComp)
    ):
        return False
    turned = names_in(*(each.target for each in made.generators))
    goes_over = names_in(*(each.iter for each in made.generators))
    value = element_of(made)
    while is_call(value, KEEPS) and isinstance(value.func, ast.Attribute):
        value = value.func.value
    if not is_operation(value, ast.Add, ast.Sub):
        return False
    old = data_of(value.left)
    return (
        isinstance(old, ast.Name)
        and old.id in turned
        and bool(names(statement.targets) & goes_over)
        and (
            bool(names_in(made) & place.gradients)
            or any(isinstance(node, ast.Attribute) and node.attr == "grad" for node in ast.walk(made))
        )
    )


def _beside_gradients(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether a statement is a part of an update, as its loop reads gradients: `p.add_(m, alpha=-lr)` after
    `m.mul_(beta).add_(p.grad)`. Of two weights it must change the one with the gradient."""
    inside = [node for loop in place.loops[:1] for node in ast.walk(loop)]
    read = [node for node in inside if isinstance(node, ast.Attribute) and node.attr == "grad"]
    own = {ast.unparse(node.value) for node in read}
    change = changed(place.statement)
    root = change[0] if change else None
    while isinstance(root, (ast.Call, ast.Attribute)):
        root = root.func if isinstance(root, ast.Call) else root.value
    return bool(own) and (not in_pairs(place, nodes) or (root is not None and ast.unparse(root) in own))


def serves_average(place: Place) -> bool:
    """Whether a statement does nothing but help a loop that averages weights: it is in one, or its header,
    or gets or puts back the states that one beside it goes over: `average.load_state_dict(kept)`."""
    statement, around = place.statement, place.loops[0] if place.loops else place.function
    if any(isinstance(loop, ast.For) and _turn_does(EMA, place, (loop,)) for loop in (statement, around)):
        return True
    calls = [call for call in calls_of(statement) if is_call(call, STATES)]
    if not calls or around is None:
        return False
    states = writes(statement) | names_in(*(given for call in calls for given in given_to(call)))
    beside = [loop for loop in ast.walk(around) if isinstance(loop, ast.For) and loop is not around]
    return any(states & names_in(loop) and _turn_does(EMA, place, (loop,)) for loop in beside)


def serves_clip(place: Place) -> bool:
    """Whether a statement makes what the same turn of a loop over weights limits a gradient by, in the
    statement itself: `most = p.norm() * 0.01`, before `p.grad.clamp_(-most, most)`."""
    loop, made = place.loops[0] if place.loops else None, writes(place.statement)
    if not isinstance(loop, ast.For) or not made or not _turn_does(CLIP, place, place.loops):
        return False
    inside = (replace(place, statement=inner) for inner in _statements(loop.body))
    return any(
        made & names(nodes_of(each.statement))
        and _changes_gradient(each)
        and CLIP in of_weights(each, nodes_of(each.statement))
        for each in inside
        if each.statement is not place.statement
    )


def _changes_gradient(place: Place) -> bool:
    """Whether a statement puts something in the place of a gradient, or changes it there, and does not only
    measure it."""
    value = place.statement.value if isinstance(place.statement, ast.Expr) else None
    method = value.func if isinstance(value, ast.Call) else None
    changed_there = [method.value] if isinstance(method, ast.Attribute) and in_place(method.attr) else []
    return any(is_gradient(each, place) for each in (*targets_of(place.statement), *changed_there))


def serves_update(place: Place, nodes: Sequence[ast.AST]) -> bool:
    """Whether a statement helps a loop over weights that updates them, as the denominator of an Adam does:
    `den = v.sqrt().add_(eps)`. Only elementwise work is what calls for all tensors save: no products of
    matrices, and nothing that cannot be looked into."""
    loop = place.loops[0] if place.loops else None
    if not isinstance(loop, ast.For) or any(map(is_product, nodes)):
        return False
    calls = (node for node in nodes if isinstance(node, ast.Call))
    if not all(
        is_elementwise(each) or is_call(each, BESIDE | ELEMENTWISE) or callee(each)[1] == "math"
        for each in calls
    ):
        return False
    over = names_in(loop.iter) & (OVER_WEIGHTS | place.weights | place.gradients)
    groups = any(
        isinstance(each, ast.Subscript) and key_of(each) == "params" for each in ast.walk(loop.iter)
    )
    return bool(over or groups) and _turn_does(UPDATE, place, place.loops)


def _turn_does(idiom: str, place: Place, loops: tuple[Loop, ...]) -> bool:
    """Whether a turn of the first loop, if that trains nothing, averages or updates weights, in a statement
    of its own or under a condition. Each statement of a turn asks this: it is looked for once."""
    asked = (idiom, loops[0], place.function)
    if asked not in place.turns:
        statements = _statements(loops[0].body) if is_side_loop(loops[0]) else ()
        place.turns[asked] = any(
            idiom in of_weights(replace(place, statement=inner, loops=loops), nodes_of(inner))
            for inner in statements
        )
    return place.turns[asked]


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a turn, and those under a condition."""
    for inner in body:
        if isinstance(inner, (ast.If, ast.With)):
            yield from _statements([*inner.body, *(inner.orelse if isinstance(inner, ast.If) else [])])
        else:
            yield inner


def of_lists(call: ast.Call, place: Place) -> Iterator[str]:
    """Yields what a call of torch's does to all weights or gradients of lists,
    `torch._foreach_lerp_(averages, weights, r)`; of any other lists, that it is one call."""
    name = last_name(call.func)
    if not name.startswith("_foreach_") or not call.args or not takes_lists(call):
        return
    yield WHOLE
    does = words(name)
    used = names_in(*given_to(call))
    held = [bool(names_in(arg) & (OVER_WEIGHTS | place.weights)) for arg in call.args]
    if used & place.gradients or words_of(used) & GRADIENTS:
        if "norm" in does or (does & {"mul", "div"} and _by_norms(used, place)):
            yield CLIP
        elif held[0]:
            yield UPDATE
    elif "lerp" in does or (
        does & {"mul", "add"} and (words_of(used) & OF_AVERAGES or ("add" in does and sum(held) > 1))
    ):
        yield EMA


def _by_norms(used: set[str], place: Place) -> bool:
    """Whether names are of what was made of the norms of gradients, or say that they clip."""
    told = words_of(used)
    return bool(used & place.norms) or bool(told & CLIPPING_WORDS and not told & AVERAGING_WORDS)


def _clips(place: Place) -> bool:
    """Whether a statement limits a gradient, or scales it by a norm, in its own place."""
    return any(
        is_call(value, CLAMPS) or _by_norms(names_in(value), place) for value in _new_gradients(place)
    )


def _new_gradients(place: Place) -> Iterator[ast.expr]:
    """Yields what a gradient is scaled by, or that which is limited or scaled and takes its place."""
    statement = place.statement
    made: list[ast.expr | None] = []
    if isinstance(statement, ast.AugAssign):
        if isinstance(statement.op, (ast.Mult, ast.Div)) and is_gradient(statement.target, place):
            yield statement.value
    elif isinstance(statement, ast.Assign):
        made = [statement.value for target in statement.targets if is_gradient(target, place)]
    elif isinstance(statement, ast.Return) and place.hooked:
        value = statement.value
        made = [value.body if isinstance(value, ast.Lambda) else value]  # what `make_clip(1.0)` returns
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        call = statement.value
        if is_call(call, HOOKS):
            made = [arg.body for arg in call.args if isinstance(arg, ast.Lambda)]
        elif isinstance(call.func, ast.Attribute) and is_gradient(call.func.value, place):
            made = [*call.args[:1]] if call.func.attr == "copy_" else []
            yield from call.args[:1] if call.func.attr in SCALES else ()
    for value in made:
        arms: list[ast.expr | None] = [*value.args[1:]] if is_call(value, {"where"}) else [value]
        yield from (arm for arm in arms if is_operation(arm, ast.Mult, ast.Div) or is_call(arm, SCALED))


def _projects(place: Place) -> bool:
    """Whether a statement adds a product to a gradient, or to what a loop goes over: `g -= (g @ h) * h`.

    To clip is to multiply by a number, or to sum norms.
    """
    change = changed(place.statement)
    if change is None or not isinstance(change[1], (ast.Add, ast.Sub)):
        return False
    target, _, by = change
    of_turn = isinstance(data_of(target), ast.Name) and names([data_of(target)]) & turns(place)
    return bool(names_in(target) & GRADIENTS or of_turn) and any(
        is_operation(node, ast.Mult, ast.Div) for value in by for node in ast.walk(value)
    )
