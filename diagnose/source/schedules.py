"""What a function does for the learning rate alone, where the script has written its schedule itself."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Mapping, Sequence

from diagnose.source.blocks import Blocks
from diagnose.source.calling import TRAINS, bound, callee, calls_of, is_call, parameters_of
from diagnose.source.flows import made_for
from diagnose.source.kinds import ForLoop, Function, Loop, Scope
from diagnose.source.names import names_in, words
from diagnose.source.reads_writes import reads, reads_in, writes
from diagnose.source.statements import statements_of, targets_of

RATES = {"lr", "weight_decay", "momentum"}
"""What a schedule sets in an optimizer's groups of parameters."""

GROUPS = "param_groups"

RATE_WORDS = {"lr", "lrs", "rate", "rates", "momentum", "decay", "wd"}
"""What the name of a method says that sets a rate. Any object may have an `update` or a `step`."""

RateSetters = Mapping[str, tuple[Function, frozenset[str]]]
"""By the names of functions, they and those of their parameters that they set as rates."""


def sets_rate(statement: ast.stmt, loops: Sequence[Loop], groups: Collection[str] = ()) -> bool:
    """Whether a statement in loops sets the rate of an optimizer's group of parameters, where some names
    hold such groups, or one of them: `group["lr"] = rate`."""
    held = {GROUPS, *groups}
    over = (loop for loop in loops if isinstance(loop, ForLoop) and held & names_in(loop.iter))
    turns = names_in(*(loop.target for loop in over))
    return any(names_in(group) & (turns | held) for group, _ in _rates(statement))


def groups_of(function: Scope) -> frozenset[str]:
    """Returns the names of a function that hold an optimizer's groups of parameters, or one of them."""
    return frozenset(
        target.id
        for statement in statements_of(function)
        if isinstance(statement, ast.Assign) and _is_of_groups(statement.value)
        for target in statement.targets
        if isinstance(target, ast.Name)
    )


def _is_of_groups(value: ast.expr) -> bool:
    value = value.value if isinstance(value, ast.Subscript) else value
    return isinstance(value, ast.Attribute) and value.attr == GROUPS


def _rates(statement: ast.stmt) -> list[tuple[ast.expr, ast.expr | None]]:
    """Returns the containers in which a statement sets a rate, and to what, where it says so:
    `group["lr"] = rate`, `group.update(lr=rate)`."""
    call = statement.value if isinstance(statement, ast.Expr) else None
    if is_call(call, {"update"}) and isinstance(call.func, ast.Attribute):
        return [(call.func.value, each.value) for each in call.keywords if each.arg in RATES]
    value = statement.value if isinstance(statement, ast.Assign) else None
    return [
        (target.value, value)
        for target in targets_of(statement)
        if isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value in RATES
    ]


def rate_setters(functions: Mapping[str, Sequence[Function]]) -> RateSetters:
    """Returns the functions of a file that set a rate which they are given, `def set_lr(optimizer, lr)`;
    one of several with a name is not known by it."""
    found: dict[str, tuple[Function, frozenset[str]]] = {}
    for name, same in functions.items():
        function = same[0]
        if len(same) > 1 or isinstance(function, ast.Lambda):
            continue
        if parameters_of(function)[:1] in (["self"], ["cls"]) and not words(name) & RATE_WORDS:
            continue
        statements = list(statements_of(function))
        made = set().union(*map(writes, statements))
        kept = _set_by(_setters(function, statements)) & set(parameters_of(function)) - made
        if kept:
            found[name] = function, frozenset(kept)
    return found


def rates_of(function: Scope, setting: RateSetters) -> frozenset[str]:
    """Returns the names of a function whose values become a rate of the optimizer's, and nothing else but
    something to be told or compared: `lr`, in `lr = rate_at(step)` before `group["lr"] = lr`.

    What is set as it is, or given to a function that does so, is a rate whatever else reads it, such as a
    record or a `return`, unless something is trained with it.
    """
    statements = list(statements_of(function))
    setters = _setters(function, statements)
    given = {id(each): given_as_rates(each, setting) for each in statements}
    ends = [each for each in statements if each in setters or given[id(each)]]
    if not ends:
        return frozenset()

    def serves(statement: ast.stmt, name: str) -> bool:
        return statement in setters or name in reads_in(*given[id(statement)])

    direct = _set_by(setters) | {name for rates in given.values() for name in map(_name_of, rates)}
    direct -= set().union(*map(_trained_with, statements))
    blocks = Blocks(function)

    def is_set(writer: ast.stmt, name: str) -> bool:
        """Whether what a statement gives a name is set, and not another thing that is called so later."""
        return not calls_of(writer) or any(
            name in reads(end) and blocks.reaches(writer, name, end) for end in ends
        )

    kept = {
        name for name in direct if all(is_set(each, name) for each in statements if name in writes(each))
    }
    return made_for(statements, serves, kept)


def _setters(function: Scope, statements: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements of a function that set a rate."""
    if not any(map(_rates, statements)):
        return []
    blocks, groups = Blocks(function), groups_of(function)
    return [each for each in statements if sets_rate(each, blocks.loops(each), groups)]


def _set_by(setters: Iterable[ast.stmt]) -> set[str]:
    """Returns the names of what statements set as a rate as it is."""
    return {_name_of(value) for each in setters for _, value in _rates(each) if value is not None} - {""}


def _name_of(value: ast.expr) -> str:
    return ast.unparse(value) if isinstance(value, (ast.Name, ast.Attribute)) else ""


def given_as_rates(statement: ast.stmt, setting: RateSetters) -> list[ast.expr]:
    """Returns what a statement gives as a rate to a function that sets it."""
    found: list[ast.expr] = []
    for call in calls_of(statement) if setting else ():
        name, base = callee(call)
        if base and not words(name) & RATE_WORDS:
            continue  # another's method of that name
        function, rates = setting.get(name, (None, frozenset()))
        found += [value for name, value in bound(call, function) if name in rates]
    return found


def _trained_with(statement: ast.stmt) -> set[str]:
    """Returns the names of what a statement trains with."""
    return reads_in(*(call for call in calls_of(statement) if is_call(call, TRAINS)))
