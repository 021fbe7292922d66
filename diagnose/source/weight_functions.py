"""Which functions of a file are given one weight after the other, or its gradient, by loops or by hooks."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from diagnose.source.calling import bound, callee, calls_in, is_call, parameters_of
from diagnose.source.kinds import Comprehension, Definition, ForLoop, Loop
from diagnose.source.names import last_name, names_in
from diagnose.source.reads_writes import key_of
from diagnose.source.statements import assigned, nodes_within
from diagnose.source.weight_words import GRADIENTS, HOOKS, KEEPS, OVER_WEIGHTS, RESHAPES, Kind, Scope

KindOf = Callable[[ast.expr, Scope], Kind | None]
"""Tells what an expression in a function holds."""

Turns = dict[str, Kind | None]
"""What each variable of a loop is, turn by turn: a weight, a gradient, or, `None`, its name or number."""


def defined(node: ast.AST, inside: str = "") -> Iterator[tuple[Definition, str]]:
    """Yields the functions of a file and the class that each is a method of."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield child, inside
        yield from defined(child, child.name if isinstance(child, ast.ClassDef) else "")


def scoped(node: ast.AST, scope: Scope = None) -> Iterator[tuple[Scope, ast.AST]]:
    """Yields all that a file is made of, with the innermost function around each."""
    for child in ast.iter_child_nodes(node):
        yield scope, child
        yield from scoped(child, child if isinstance(child, Definition) else scope)


def hooked(
    tree: ast.Module, functions: Mapping[str, Definition], weights: set[str]
) -> Iterator[tuple[Definition, str, str]]:
    """Yields the functions that hooks of all weights call, `for p in weights: p.register_hook(clip)`, with
    the parameter that is given the weight or gradient, and the method by which they are hooked.

    Args:
        functions: Those of the file, by name.
        weights: The names that hold weights anywhere in it.
    """
    values = {
        target.id: value
        for node in nodes_within(tree)
        for target, value in assigned(node)
        if isinstance(target, ast.Name)
    }
    for loop in nodes_within(tree):
        if not isinstance(loop, ForLoop) or not names_in(loop.iter) & (OVER_WEIGHTS | weights):
            continue
        for call in calls_in(loop):
            name, base = callee(call)
            if name in HOOKS and call.args and base in names_in(loop.target):
                function, parameter = _called_by_hook(call.args[0], functions, values)
                if function is not None and parameter:
                    yield function, parameter, name


def _called_by_hook(
    given: ast.expr, functions: Mapping[str, Definition], values: Mapping[str, ast.expr]
) -> tuple[Definition | None, str]:
    """Returns the function that a hook calls, and the first of its parameters that is not bound: that of
    `clip`, of `partial(clip, 1.0)`, or what `make_clip(1.0)` returns."""
    if isinstance(given, ast.Name) and given.id not in functions:
        given = values.get(given.id, given)
    num_bound, named = 0, set[str | None]()
    if is_call(given, {"partial"}) and given.args:
        num_bound, named = len(given.args) - 1, {keyword.arg for keyword in given.keywords}
        given = given.args[0]
    elif isinstance(given, ast.Call):
        return _returned(functions.get(last_name(given.func)))
    function = functions.get(last_name(given))
    taken = parameters_of(function) if function is not None else []
    taken = taken[1:] if taken[:1] in (["self"], ["cls"]) else taken
    return function, next((each for each in taken[num_bound:] if each not in named), "")


def _returned(function: Definition | None) -> tuple[Definition | None, str]:
    """Returns the function, defined inside of one, that this returns and nothing else, and its first
    parameter; for a lambda the function around it, on whose line it stands."""
    returns = [
        node.value
        for scope, node in (scoped(function, function) if function is not None else ())
        if isinstance(node, ast.Return) and scope is function
    ]
    made = returns[0] if len(returns) == 1 else None
    if isinstance(made, ast.Lambda):
        return function, next(iter(parameters_of(made)), "")
    if function is None or not isinstance(made, ast.Name):
        return None, ""
    inner = {each.name: each for each, _ in defined(function)}.get(made.id)
    return inner, next(iter(parameters_of(inner)), "") if inner is not None else ""


def turned(tree: ast.Module, kind_of: KindOf) -> dict[Definition, dict[str, Kind]]:
    """Returns the functions that nothing calls but loops over weights, once for each, with the parameters
    that are given the weight, or its gradient: `for p in weights: total += energy(p.grad)`.

    A function that loops itself is left out: what it does to one weight may be much, and one after the
    other of something else.
    """
    found = list(defined(tree))
    count = Counter(function.name for function, _ in found)
    functions = {
        function.name: (function, bool(inside))
        for function, inside in found
        if count[function.name] == 1
        and not any(isinstance(node, (Loop, ast.comprehension)) for node in ast.walk(function))
    }
    uses: Counter[str] = Counter()
    for node in nodes_within(tree):
        name, is_method = _reference(node)
        if name in functions and functions[name][1] is is_method:
            uses[name] += 1
    given: dict[str, dict[int, set[tuple[str, Kind]]]] = {}
    for scope, node in scoped(tree):
        for turns, inside in _loops(node, scope, kind_of):
            for call in (each for each in inside if isinstance(each, ast.Call)):
                name, is_method = _reference(call.func)
                if name not in functions or functions[name][1] is not is_method:
                    continue
                if any(isinstance(arg, ast.Starred) for arg in call.args):
                    continue
                kinds = given.setdefault(name, {}).setdefault(id(call), set())
                for parameter, value in bound(call, functions[name][0]):
                    kind = _of_turn(value, turns, scope, kind_of)
                    if kind is not None:
                        kinds.add((parameter, kind))
    return {
        functions[name][0]: dict(set.intersection(*calls.values()))
        for name, calls in given.items()
        if len(calls) == uses[name]
    }


def _reference(node: ast.AST) -> tuple[str, bool]:
    """Returns the name that is read, and whether as an attribute."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        return node.id, False
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr, True
    return "", False


def _loops(node: ast.AST, scope: Scope, kind_of: KindOf) -> Iterator[tuple[Turns, list[ast.AST]]]:
    """Yields the turns of a loop or comprehension over weights, and all that is in it."""
    if isinstance(node, ForLoop):
        turns = dict(_turns(node.target, node.iter, scope, kind_of))
        inside = [each for statement in node.body for each in ast.walk(statement)]
        for each in inside if turns else ():  # `g = p.grad`
            for target, value in assigned(each):
                kind = _of_turn(value, turns, scope, kind_of)
                if isinstance(target, ast.Name) and kind is not None:
                    turns[target.id] = kind
    elif isinstance(node, Comprehension):
        turns = {
            name: kind
            for each in node.generators
            for name, kind in _turns(each.target, each.iter, scope, kind_of)
        }
        inside = list(ast.walk(node))
    else:
        return
    if turns:
        yield turns, inside


def _turns(
    target: ast.expr, source: ast.expr, scope: Scope, kind_of: KindOf
) -> Iterator[tuple[str, Kind | None]]:
    """Yields the variables of a loop that hold one weight or gradient, or its name, turn by turn."""
    elements = target.elts if isinstance(target, ast.Tuple) else []
    name = last_name(source.func) if isinstance(source, ast.Call) else ""
    if isinstance(source, ast.Call) and name == "zip":
        for element, each in zip(elements, source.args, strict=False):
            yield from _turns(element, each, scope, kind_of)
        return
    if isinstance(source, ast.Call) and name in ("list", "tuple", "reversed") and source.args:
        yield from _turns(target, source.args[0], scope, kind_of)
        return
    if name in ("enumerate", "items", "named_parameters"):
        if len(elements) != 2:
            return
        if isinstance(source, ast.Call) and name == "enumerate" and source.args:
            inner = list(_turns(elements[1], source.args[0], scope, kind_of))
        else:
            inner = list(_turned(elements[1], source, scope, kind_of))
        yield from inner
        if inner and isinstance(elements[0], ast.Name):
            yield elements[0].id, None
        return
    yield from _turned(target, source, scope, kind_of)


def _turned(
    target: ast.expr, source: ast.expr, scope: Scope, kind_of: KindOf
) -> Iterator[tuple[str, Kind | None]]:
    """Yields a variable and what it holds, where that is a weight or gradient of what is gone over."""
    kind = _held(source, scope, kind_of)
    if isinstance(target, ast.Name) and kind is not None:
        yield target.id, kind


def _held(source: ast.expr, scope: Scope, kind_of: KindOf) -> Kind | None:
    """Returns what one thing after the other holds; of a few lists, written out, nothing."""
    if isinstance(source, (ast.Tuple, ast.List)):
        return None
    known = kind_of(source, scope)
    if known is not None:
        return known
    if isinstance(source, ast.Subscript) and key_of(source) == "params":
        return "weights"
    name = last_name(source)
    if name in GRADIENTS:
        return "gradients"
    return "weights" if name == "params" else None


def _of_turn(value: ast.expr, turns: Turns, scope: Scope, kind_of: KindOf) -> Kind | None:
    """Returns whether an expression is the weight of a turn, `p`, `p.data`, `kept[name]`, or its gradient;
    `None` for what is measured or made of it."""
    of_gradient = False
    while not isinstance(value, ast.Name):
        if isinstance(value, ast.Attribute) and value.attr in ("data", "grad"):
            of_gradient |= value.attr == "grad"
            value = value.value
        elif is_call(value, KEEPS | RESHAPES) and isinstance(value.func, ast.Attribute):
            value = value.func.value
        else:
            break
    kind: Kind | None = None
    if isinstance(value, ast.Name):
        kind = turns.get(value.id)
    elif isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Name) and value.slice.id in turns:
        kind = _held(value.value, scope, kind_of)
    return "gradients" if kind and of_gradient else kind
