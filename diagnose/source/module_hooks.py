"""Which lines of a file are of hooks of modules that only note numbers, which trains nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from diagnose.source.reads_writes import APPENDS, in_place, writes
from diagnose.source.statements import Function, callee, functions_of, parameters_of, statements_of

REGISTER = {"register_forward_hook", "register_full_backward_hook", "register_module_forward_hook"}
"""Functions and methods of torch's that are given a function, which each call of a module runs. One
that runs before the call may prepare weights for it, as that of `spectral_norm` does."""

NUMBERS = {"item", "tolist"}
"""Methods that give Python's numbers, which have no gradient."""

TRAINS = {"backward", "step", "register_buffer", "register_parameter", "load_state_dict", "setattr"}


def noting_lines(tree: ast.Module) -> set[int]:
    """Returns the lines of functions that the file gives to modules as hooks, and that hand nothing back,
    change nothing that they are given, and keep numbers: of other values a loss may be made."""
    given = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and callee(node)[0] in REGISTER and node.args
    ]
    functions: dict[str, list[Function]] = {}
    for function in functions_of(tree) if given else ():
        if not isinstance(function, ast.Module):
            functions.setdefault(function.name, []).append(function)
    return {
        line
        for each in given
        for function in _given(each, functions)
        if _only_notes(function)
        for line in _lines(function)
    }


def _given(node: ast.expr, functions: Mapping[str, Sequence[Function]]) -> Iterator[Function]:
    """Yields the functions that an expression may be: `note`, `self.note`, `partial(note, name)`, or what
    `noting(name)` returns."""
    if isinstance(node, ast.Lambda):
        yield node
    elif isinstance(node, ast.Name):
        yield from functions.get(node.id, ())
    elif isinstance(node, ast.Attribute):
        yield from functions.get(node.attr, ())
    elif isinstance(node, ast.Call) and callee(node)[0] == "partial" and node.args:
        yield from _given(node.args[0], functions)
    elif isinstance(node, ast.Call):
        for maker in functions.get(callee(node)[0], ()):
            for statement in [] if isinstance(maker, ast.Lambda) else statements_of(maker):
                value = statement.value if isinstance(statement, ast.Return) else None
                if isinstance(value, (ast.Name, ast.Lambda)):
                    yield from (each for each in _given(value, functions) if each.lineno in _lines(maker))


def _lines(function: Function) -> range:
    return range(function.lineno, (function.end_lineno or function.lineno) + 1)


def _only_notes(function: Function) -> bool:
    calls = [callee(node) for node in ast.walk(function) if isinstance(node, ast.Call)]
    if any(name in TRAINS or in_place(name) for name, _ in calls):
        return False
    if not any(name in NUMBERS or (name, base) == ("float", "") for name, base in calls):
        return False
    if isinstance(function, ast.Lambda):
        return isinstance(function.body, ast.Call) and callee(function.body)[0] in APPENDS
    given = set(parameters_of(function)) - {"self"}
    return not any(_gives_back(each) or _changes(each, given) for each in statements_of(function))


def _gives_back(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Return) else None
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def _changes(statement: ast.stmt, given: set[str]) -> bool:
    """Whether a statement writes into what its function was given: `module.scale = ...`, `output += 1`."""
    made = writes(statement)
    into = {name.partition("[")[0].partition(".")[0] for name in made if not name.isidentifier()}
    return bool((into | made if isinstance(statement, (ast.AugAssign, ast.Expr)) else into) & given)
