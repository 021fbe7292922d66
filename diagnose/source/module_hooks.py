"""Which lines of a file are of hooks of modules that only note numbers, which trains nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence

from diagnose.source.calling import callee, calls_in, given_to, is_call, parameters_of
from diagnose.source.kinds import Assignment, Comprehension, Function
from diagnose.source.names import last_name, names_in, variables
from diagnose.source.reads_writes import APPENDS, in_place, writes
from diagnose.source.statements import (
    all_lines,
    assigned,
    element_of,
    functions_of,
    nodes_within,
    statements_of,
    targets_of,
)

REGISTER = {"register_forward_hook", "register_full_backward_hook", "register_module_forward_hook"}
"""Functions and methods of torch's that are given a function, which each call of a module runs. One
that runs before the call may prepare weights for it, as that of `spectral_norm` does."""

NUMBERS = {"item", "tolist"}
"""Methods that give Python's numbers, which have no gradient."""

SIZES = {"numel", "dim", "size", "shape"}

CASTS = {"float", "int", "len", "str", "id", "type"}
"""Functions of Python's that give what no gradient passes through."""

KEEPS = {*APPENDS, "add", "insert", "put", "setdefault", "update"}
"""Methods that leave to others what they are given."""

TRAINS = {"backward", "step", "register_buffer", "register_parameter", "load_state_dict", "setattr"}


def noting_lines(tree: ast.Module) -> set[int]:
    """Returns the lines of functions that the file gives to modules as hooks, and that hand nothing back,
    change nothing that they are given, and keep numbers: of other values a loss may be made."""
    given = [node.args[0] for node in nodes_within(tree) if is_call(node, REGISTER) and node.args]
    functions: dict[str, list[Function]] = {}
    for function in functions_of(tree) if given else ():
        if not isinstance(function, ast.Module):
            functions.setdefault(function.name, []).append(function)
    return {
        line
        for each in given
        for function in _given(each, functions)
        if _only_notes(function)
        for line in all_lines(function)
    }


def _given(node: ast.expr, functions: Mapping[str, Sequence[Function]]) -> Iterator[Function]:
    """Yields the functions that an expression may be: `note`, `self.note`, `partial(note, name)`, or what
    `noting(name)` returns."""
    if isinstance(node, ast.Lambda):
        yield node
    elif is_call(node, {"partial"}) and node.args:
        yield from _given(node.args[0], functions)
    elif not isinstance(node, ast.Call):
        yield from functions.get(last_name(node), ())
    else:
        for maker in functions.get(last_name(node.func), ()):
            for statement in statements_of(maker):
                value = statement.value if isinstance(statement, ast.Return) else None
                if isinstance(value, (ast.Name, ast.Lambda)):
                    yield from (
                        each for each in _given(value, functions) if each.lineno in all_lines(maker)
                    )


def _only_notes(function: Function) -> bool:
    calls = list(map(callee, calls_in(function)))
    if any(name in TRAINS or in_place(name) for name, _ in calls):
        return False
    if not any(name in NUMBERS or (name, base) == ("float", "") for name, base in calls):
        return False
    tensors = _tensors(function)
    if isinstance(function, ast.Lambda):
        call = function.body
        return is_call(call, APPENDS) and all(_is_number(each, tensors, {}) for each in given_to(call))
    statements = list(statements_of(function))
    turns = set().union(*(_turns(each) for each in statements if isinstance(each, (ast.For, ast.With))))
    made = _made(function)
    if not all(_is_number(each, tensors | turns, made) for each in _kept(statements)):
        return False
    given = set(parameters_of(function)) - {"self"}
    return not any(_gives_back(each) or _changes(each, given) for each in statements)


def _tensors(function: Function) -> set[str]:
    """Returns the parameters of a hook that are called with tensors or modules: the last three; what comes
    before was bound to it, `partial(note, name)`, as was what has a default, `name=name`."""
    given = [*function.args.posonlyargs, *function.args.args]
    bound = len(given) - len(function.args.defaults)
    return {each.arg for each in given[:bound][-3:]} - {"self", "name"}


def _turns(statement: ast.For | ast.With) -> set[str]:
    """Returns what a loop's variables are in each turn, without the numbers and keys that it counts by."""
    if not isinstance(statement, ast.For) or not isinstance(statement.target, ast.Tuple):
        return writes(statement)
    counts = is_call(statement.iter, ("enumerate", "items"))
    return names_in(*statement.target.elts[counts:])


def _made(function: Function) -> dict[str, list[ast.expr]]:
    """Returns what the names of a function are given there."""
    made: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        pairs = list(assigned(node))
        if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) and node.value is not None:
            pairs.append((node.target, node.value))
        for target, value in pairs:
            for name in variables(ast.walk(target), ast.Store):
                made.setdefault(name, []).append(value)
    return made


def _kept(statements: Sequence[ast.stmt]) -> Iterator[ast.expr]:
    """Yields the values that a function leaves for others."""
    outer = {
        name for each in statements if isinstance(each, (ast.Global, ast.Nonlocal)) for name in each.names
    }
    for each in statements:
        if isinstance(each, Assignment) and each.value is not None:
            inside = [node for target in targets_of(each) for node in ast.walk(target)]
            put = any(isinstance(node, (ast.Attribute, ast.Subscript)) for node in inside)
            if put or outer & writes(each):
                yield each.value
        elif isinstance(each, ast.Expr) and is_call(each.value, KEEPS):
            yield from given_to(each.value)


def _is_number(value: ast.AST, given: set[str], made: Mapping[str, Sequence[ast.expr]]) -> bool:
    """Whether a value is made of numbers of Python's, as far as its text tells, and of what is no tensor's.

    Args:
        given: Names of what may be tensors.
        made: What the names of its function are given.
    """
    if isinstance(value, ast.Name) and value.id in made:
        others = {name: values for name, values in made.items() if name != value.id}
        return all(_is_number(each, given, others) for each in made[value.id])
    if isinstance(value, ast.Name):
        return value.id not in given
    if isinstance(value, (ast.Constant, ast.JoinedStr, ast.Compare)):
        return True
    if isinstance(value, ast.Attribute) and value.attr in {*SIZES, "__name__", "__class__"}:
        return True
    if isinstance(value, ast.Subscript):
        return _is_number(value.value, given, made)
    if isinstance(value, ast.IfExp):
        return _is_number(value.body, given, made) and _is_number(value.orelse, given, made)
    if isinstance(value, ast.Call):
        name, base = callee(value)
        if name in NUMBERS | SIZES or (name in CASTS and not base):
            return True
    if isinstance(value, Comprehension):
        turns = variables(node for each in value.generators for node in ast.walk(each.target))
        return _is_number(element_of(value), given | turns, made)
    return all(_is_number(each, given, made) for each in ast.iter_child_nodes(value))


def _gives_back(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Return) else None
    return value is not None and not (isinstance(value, ast.Constant) and value.value is None)


def _changes(statement: ast.stmt, given: set[str]) -> bool:
    """Whether a statement writes into what its function was given: `module.scale = ...`, `output += 1`."""
    made = writes(statement)
    into = {name.partition("[")[0].partition(".")[0] for name in made if not name.isidentifier()}
    return bool((into | made if isinstance(statement, (ast.AugAssign, ast.Expr)) else into) & given)
